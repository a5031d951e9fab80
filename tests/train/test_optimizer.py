import pytest
import torch
from torch import nn

from dflash_tools.config import OptimizerSection
from dflash_tools.train.optimizer import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
    trainable_parameters,
)


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(3))
    model[1].bias.requires_grad_(False)
    return model


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in trainable_parameters(model).values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_matrices_are_decayed_and_norms_are_not():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(model[0].weight): 0.5, id(model[1].weight): 0.0}


def test_a_restored_state_continues_bit_for_bit():
    """RC-17: Adam step and both moments come back."""
    straight, resumed = make_model(), make_model(seed=1)
    settings = OptimizerSection(learning_rate=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(straight, settings)
    train(straight, optimizer, 3, seed=0)
    resumed.load_state_dict(straight.state_dict())
    restored = build_optimizer(resumed, settings)
    load_optimizer_tensors(restored, resumed, {k: v.clone() for k, v in optimizer_tensors(optimizer, straight).items()})
    for model, state in ((straight, optimizer), (resumed, restored)):
        set_learning_rate(state, 3e-3)
        train(model, state, 2, seed=7)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    for name, tensor in optimizer_tensors(optimizer, straight).items():
        assert torch.equal(tensor, optimizer_tensors(restored, resumed)[name])
    assert optimizer_tensors(restored, resumed)["step.0.weight"] == 5


def test_prepared_moments_act_like_those_that_torch_makes_itself():
    ours, theirs = make_model(), make_model()
    train(ours, build_optimizer(ours, OptimizerSection(learning_rate=1e-2)), 3, seed=1)
    plain = torch.optim.AdamW(
        trainable_parameters(theirs).values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    train(theirs, plain, 3, seed=1)
    assert torch.equal(ours[0].weight, theirs[0].weight)


def test_state_of_another_model_is_refused():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerSection())
    tensors = dict(optimizer_tensors(optimizer, model))
    with pytest.raises(ValueError, match=r"other tensors than the model: step\.1\.weight"):
        load_optimizer_tensors(optimizer, model, {k: v for k, v in tensors.items() if k != "step.1.weight"})
    tensors["exp_avg.1.weight"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg\.1\.weight: shape \(4,\), expected \(3,\)"):
        load_optimizer_tensors(optimizer, model, tensors)


def test_bfloat16_masters_are_refused():
    """TN-02: updates near 1.0 would vanish."""
    with pytest.raises(ValueError, match="master weights must be float32"):
        build_optimizer(make_model().to(torch.bfloat16), OptimizerSection())
