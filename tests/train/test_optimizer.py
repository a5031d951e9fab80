import pytest
import torch
from torch import nn

from dflash_tools.config import OptimizerSection
from dflash_tools.errors import ConfigError
from dflash_tools.train.optimizer import DrafterOptimizer, trainable_parameters


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(3))
    model[1].bias.requires_grad_(False)
    return model


class Stack(nn.Module):
    """Names as in a drafter: fc and norm outside, matrices and norms inside the layers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(6, 4, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 3, bias=False), nn.RMSNorm(3)) for _ in range(2)])
        self.norm = nn.RMSNorm(4)


def train(model, optimizer, steps, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in trainable_parameters(model).values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(factor)


def test_matrices_are_decayed_and_norms_are_not():
    model, settings = make_model(), OptimizerSection(weight_decay=0.5, learning_rate=0.1)
    before = [parameter.detach().clone() for parameter in (model[0].weight, model[1].weight)]
    optimizer = DrafterOptimizer(model, settings)
    for parameter in trainable_parameters(model).values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    torch.testing.assert_close(model[0].weight, before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(model[1].weight, before[1])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_restored_state_continues_bit_for_bit(name):
    """RC-17: the step and all moments come back."""
    straight, resumed = Stack(), Stack(seed=1)
    settings = OptimizerSection(name=name, learning_rate=1e-2, weight_decay=0.1)
    optimizer = DrafterOptimizer(straight, settings)
    train(straight, optimizer, 3, seed=0)
    resumed.load_state_dict(straight.state_dict())
    restored = DrafterOptimizer(resumed, settings)
    restored.load({k: v.clone() for k, v in optimizer.tensors().items()})
    for model, state in ((straight, optimizer), (resumed, restored)):
        train(model, state, 2, seed=7, factor=0.3)
    for key, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key])
    for key, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, restored.tensors()[key])
    assert restored.num_updates == 5


def test_prepared_moments_act_like_those_that_torch_makes_itself():
    ours, theirs = make_model(), make_model()
    train(ours, DrafterOptimizer(ours, OptimizerSection(learning_rate=1e-2)), 3, seed=1)
    plain = torch.optim.AdamW(
        trainable_parameters(theirs).values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    plain.step = lambda factor, step=plain.step: step()
    train(theirs, plain, 3, seed=1)
    assert torch.equal(ours[0].weight, theirs[0].weight)


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest():
    model = Stack()
    names = DrafterOptimizer(model, OptimizerSection(name="muon")).tensors().keys()
    assert {name for name in names if name.startswith("momentum_buffer.")} == {
        "momentum_buffer.layers.0.0.weight",
        "momentum_buffer.layers.1.0.weight",
    }
    assert {name.removeprefix("exp_avg.") for name in names if name.startswith("exp_avg.")} == {
        "fc.weight", "norm.weight", "layers.0.1.weight", "layers.1.1.weight",
    }  # fmt: skip


def test_each_of_both_has_its_own_rate_and_muon_moves_a_matrix_as_far_as_adamw_would():
    """The update of a matrix is near orthogonal: its root mean square is 0.2 x rate whatever the gradient's size."""
    model = Stack()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = DrafterOptimizer(model, OptimizerSection(name="muon", learning_rate=1e-2, muon_learning_rate=1e-3))
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step(0.5)
    moved = {name: (tensor - before[name]).square().mean().sqrt() for name, tensor in model.state_dict().items()}
    assert moved["fc.weight"] == pytest.approx(0.5 * 1e-2, rel=0.01)
    assert 0.5 * 1e-3 * 0.2 * 0.6 < moved["layers.0.0.weight"] < 0.5 * 1e-3 * 0.2 * 1.4


def test_without_muon_in_this_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r'"muon" needs torch 2\.9 or newer.*pip install'):
        DrafterOptimizer(Stack(), OptimizerSection(name="muon"))


def test_state_of_another_model_or_optimizer_is_refused():
    optimizer = DrafterOptimizer(make_model(), OptimizerSection())
    tensors = dict(optimizer.tensors())
    with pytest.raises(ValueError, match=r"other tensors than the model: step\.1\.weight"):
        optimizer.load({k: v for k, v in tensors.items() if k != "step.1.weight"})
    tensors["exp_avg.1.weight"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg\.1\.weight: shape \(4,\), expected \(3,\)"):
        optimizer.load(tensors)


def test_bfloat16_masters_are_refused():
    """TN-02: updates near 1.0 would vanish."""
    with pytest.raises(ValueError, match="master weights must be float32"):
        DrafterOptimizer(make_model().to(torch.bfloat16), OptimizerSection())
