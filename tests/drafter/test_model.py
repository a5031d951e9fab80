import itertools

import pytest
import torch
from drafter.random_batch import make_batch, make_config, make_drafter, make_sliding_config, with_states

from dflash_tools.drafter.blocks import Blocks
from dflash_tools.drafter.loss import block_loss
from dflash_tools.drafter.model import DFlashDrafter, DrafterCache, resolve_attention
from dflash_tools.errors import ConfigError

CONFIGS = pytest.mark.parametrize("config", [make_config(), make_sliding_config()], ids=["full", "sliding"])
PATHS = pytest.mark.parametrize("path", ["dense", "split"])


def test_the_state_dict_has_the_names_and_shapes_of_a_dflash_checkpoint():
    model = DFlashDrafter(make_config(num_hidden_layers=1, layer_types=("full_attention",)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {
        "fc.weight": (16, 32),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (32, 16),
        "layers.0.self_attn.k_proj.weight": (16, 16),
        "layers.0.self_attn.v_proj.weight": (16, 16),
        "layers.0.self_attn.o_proj.weight": (16, 32),
        "layers.0.self_attn.q_norm.weight": (8,),
        "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (24, 16),
        "layers.0.mlp.up_proj.weight": (24, 16),
        "layers.0.mlp.down_proj.weight": (16, 24),
    }


def test_five_layers_have_58_tensors():
    config = make_config(num_hidden_layers=5, layer_types=("full_attention",) * 5)
    assert len(DFlashDrafter(config).state_dict()) == 58


def test_fresh_weights_depend_on_the_seed_alone():
    first, second, other = (DFlashDrafter(make_config()) for _ in range(3))
    first.init_weights(5)
    torch.manual_seed(99)
    second.init_weights(5)
    other.init_weights(6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert float(first.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert torch.all(first.norm.weight == 1)


@CONFIGS
@PATHS
def test_nothing_at_or_after_the_anchor_changes_a_block(config, path):
    """TN-07: bit for bit, with overlapping blocks."""
    model = make_drafter(config, dtype=torch.float32)
    batch = make_batch(config, lengths=(24, 16), num_anchors=12, dtype=torch.float32)
    blocks, states = batch.blocks, batch.context.hidden_states_TKH
    before = model(batch.context, blocks, batch.embedding_VH, path)
    for i in range(0, len(blocks), 3):
        document, anchor = int(blocks.document_ids_A[i]), int(blocks.anchors_A[i])
        start, end = batch.context.offsets[document : document + 2]
        changed = torch.randn(states.shape, generator=torch.Generator().manual_seed(i)) * 5
        changed[start : start + anchor] = states[start : start + anchor]
        after = model(with_states(batch.context, changed), blocks, batch.embedding_VH, path)
        assert torch.equal(before[i], after[i])
        if 0 < anchor < end - start:
            seen = states.clone()
            seen[start + anchor - 1] += 1
            assert not torch.equal(
                before[i], model(with_states(batch.context, seen), blocks, batch.embedding_VH, path)[i]
            )


@CONFIGS
@PATHS
def test_no_block_changes_another_one(config, path):
    model = make_drafter(config, dtype=torch.float32)
    batch = make_batch(config, lengths=(24, 16), num_anchors=12, dtype=torch.float32)
    before = model(batch.context, batch.blocks, batch.embedding_VH, path)
    ids = batch.blocks.ids_AS.clone()
    ids[4] = torch.tensor([7, 8, 9, 10])
    changed = Blocks(**{name: getattr(batch.blocks, name) for name in Blocks.__slots__} | {"ids_AS": ids})
    after = model(batch.context, changed, batch.embedding_VH, path)
    same = torch.tensor([torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    assert same.tolist() == [i != 4 for i in range(len(batch.blocks))]


@CONFIGS
@PATHS
@pytest.mark.parametrize("steps", [1, 3])
def test_training_over_many_blocks_equals_decoding_block_by_block(config, path, steps):
    model = make_drafter(config)
    batch = make_batch(config, lengths=(20, 13), num_anchors=8, padding=1)
    blocks, states = batch.blocks, batch.context.hidden_states_TKH
    trained = model(batch.context, blocks, batch.embedding_VH, path)
    for i in range(len(blocks)):
        start, anchor = batch.context.offsets[int(blocks.document_ids_A[i])], int(blocks.anchors_A[i])
        cache = DrafterCache()
        cuts = [anchor * k // steps for k in range(steps + 1)]
        for low, high in itertools.pairwise(cuts):
            model.append_context(cache, states[None, start + low : start + high], torch.arange(low, high))
        drafted = model.draft(cache, blocks.ids_AS[i : i + 1], anchor, batch.embedding_VH)
        assert torch.allclose(drafted[0], trained[i], atol=1e-12)
        assert len(cache) == anchor


def test_a_cache_that_does_not_end_before_the_block_is_refused():
    config = make_config()
    model, batch = make_drafter(config), make_batch(config)
    cache = DrafterCache()
    model.append_context(cache, batch.context.hidden_states_TKH[None, :3], torch.arange(3))
    with pytest.raises(ValueError, match="holds 3 tokens, a block at position 5 needs 5"):
        model.draft(cache, batch.blocks.ids_AS[:1], 5, batch.embedding_VH)


@PATHS
def test_padding_rows_give_no_nan_and_change_nothing(path):
    config = make_sliding_config()
    model = make_drafter(config)
    padded = make_batch(config, lengths=(9, 1, 6), padding=5)
    states = padded.context.hidden_states_TKH
    states[16:] = 1e3
    hidden = model(padded.context, padded.blocks, padded.embedding_VH, path)
    plain = make_batch(config, lengths=(9, 1, 6))
    expected = model(with_states(plain.context, states[:16]), plain.blocks, padded.embedding_VH, path)
    assert torch.allclose(hidden, expected, atol=1e-12)
    loss = block_loss(hidden, padded.blocks, padded.head).weighted_sum
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(model.parameters())))


@PATHS
def test_bfloat16_arithmetic_over_float32_weights_gives_float32_gradients_near_the_exact_ones(path):
    config = make_config()
    model = make_drafter(config, dtype=torch.float32)
    exact, rough = make_batch(config, dtype=torch.float32), make_batch(config, dtype=torch.bfloat16)
    gradients = []
    for batch, embedding in ((exact, exact.embedding_VH), (rough, exact.embedding_VH.bfloat16())):
        context = with_states(exact.context, exact.context.hidden_states_TKH.to(embedding.dtype))
        hidden = model(context, batch.blocks, embedding, path)
        assert hidden.dtype == embedding.dtype
        gradients.append(torch.autograd.grad(hidden.float().square().sum(), list(model.parameters())))
        assert all(gradient.dtype == torch.float32 for gradient in gradients[-1])
    for a, b in zip(*gradients, strict=True):
        assert float((a - b).norm()) < 0.1 * float(a.norm()) + 1e-3


def test_autocast_around_a_float32_model_computes_in_bfloat16_too():
    config = make_config()
    model = make_drafter(config, dtype=torch.float32)
    batch = make_batch(config, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model(batch.context, batch.blocks, batch.embedding_VH.bfloat16(), "split")
        block_loss(hidden, batch.blocks, batch.head).weighted_sum.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_rotary_frequencies_stay_in_float32_when_the_model_is_cast():
    config = make_config()
    batch = make_batch(config, lengths=(300,), num_anchors=4, dtype=torch.float32)
    model = make_drafter(config, dtype=torch.float32)
    rotation = model._rotation(torch.tensor([257]), torch.float32)
    cast = model.to(torch.bfloat16)._rotation(torch.tensor([257]), torch.float32)
    assert torch.equal(rotation.cos, cast.cos)
    angles = 257.0 / 1e4 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(rotation.cos[0, 0, :4].double(), angles.cos(), atol=1e-4)
    assert len(batch.blocks) == 4


def test_the_attention_path_follows_the_device_unless_named():
    assert resolve_attention("auto", torch.device("cpu")) == "split"
    assert resolve_attention("auto", torch.device("cuda")) == "flex"
    assert resolve_attention("dense", torch.device("cuda")) == "dense"
    with pytest.raises(ConfigError, match="needs CUDA"):
        resolve_attention("flex", torch.device("cpu"))


def test_recomputed_layers_give_the_same_gradients_to_the_bit():
    config = make_sliding_config()
    model, batch = make_drafter(config, dtype=torch.float32), make_batch(config, dtype=torch.float32)
    gradients = []
    for recompute in (False, True):
        hidden = model(batch.context, batch.blocks, batch.embedding_VH, "split", recompute_layers=recompute)
        gradients.append(torch.autograd.grad(hidden.square().sum(), list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
