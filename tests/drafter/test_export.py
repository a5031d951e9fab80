import json
from dataclasses import replace

import pytest
import torch
from independent_reader import Reader
from published_drafters import qwen3_8b, qwen35_35b_a3b, qwen36_27b, write_released
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen3Config

from dflash_tools.contracts.manifest import DataIdentity, TargetIdentity, TokenizerIdentity
from dflash_tools.drafter.check import check_folder
from dflash_tools.drafter.checkpoint_file import read_checkpoint_file
from dflash_tools.drafter.checkpoint_view import tensor_shapes
from dflash_tools.drafter.config import DrafterConfig
from dflash_tools.drafter.export import Provenance, export_drafter
from dflash_tools.drafter.model import DFlashDrafter, DrafterCache
from dflash_tools.drafter.released import initial_weights, load_drafter, released_config
from dflash_tools.errors import ConfigError

CONFIG = DrafterConfig(
    hidden_size=32,
    vocab_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=512,
    initializer_range=0.2,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=7,
    block_size=4,
    mask_token_id=63,
    target_layer_ids=(0, 2, 3),
    num_target_layers=6,
)
PROVENANCE = Provenance(
    target=TargetIdentity(
        model="example/target",
        revision="abc",
        gguf_file=None,
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_hidden_layers=6,
        hidden_size=32,
        vocab_size=64,
        dtype="bfloat16",
        quantization=None,
        attn_implementation="sdpa",
        config_fingerprint="c" * 64,
    ),
    tokenizer=TokenizerIdentity(
        fingerprint="a" * 64,
        chat_template_fingerprint="b" * 64,
        num_tokens=60,
        bos_token_id=0,
        eos_token_ids=(2,),
        pad_token_id=2,
        mask_token_id=None,
        control_token_ids=(0, 2),
        used_control_token_ids=(2,),
    ),
    data=(
        DataIdentity(
            name="texts",
            sources=("a.jsonl",),
            content_fingerprint="d" * 64,
            chat_template_kwargs={},
            max_tokens=512,
            too_long="truncate",
            loss_on="assistant",
            validation_fraction=0.1,
        ),
    ),
    store_fingerprints=("e" * 64,),
    hidden_states_dtype="bfloat16",
    step=100,
)


@pytest.fixture
def drafter():
    model = DFlashDrafter(CONFIG)
    model.init_weights(seed=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms that do something
                weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def export(drafter, folder, **kwargs):
    export_drafter(drafter.config, drafter.state_dict(), PROVENANCE, folder, **kwargs)
    return folder


def test_an_export_passes_every_rule_without_a_warning(drafter, tmp_path):
    findings = check_folder(export(drafter, tmp_path / "out"))
    assert [str(one) for one in findings if not one.ok or one.warning] == []


def test_the_config_read_by_transformers_says_what_was_trained(drafter, tmp_path):
    """XP-01, XP-02, XP-04, XP-11: nothing is left to a default of the reader."""
    folder = export(drafter, tmp_path / "out")
    loaded = AutoConfig.from_pretrained(folder)
    assert isinstance(loaded, Qwen3Config)
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (loaded.head_dim, loaded.sliding_window, loaded.use_sliding_window) == (8, 7, True)
    assert loaded.layer_types == ["sliding_attention", "full_attention"]
    assert loaded.dtype == torch.bfloat16
    assert loaded.block_size == loaded.dflash_config["block_size"] == 4
    assert loaded.dflash_config["target_layer_ids"] == [0, 2, 3]
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
    assert "auto_map" not in written


def test_the_config_says_where_the_drafter_comes_from(drafter, tmp_path):
    """XP-17."""
    own = json.loads((export(drafter, tmp_path / "out") / "config.json").read_text())["dflash_tools"]
    assert own["target"]["model"] == "example/target"
    assert own["target"]["revision"] == "abc"
    assert own["chat_template_fingerprint"] == "b" * 64
    assert own["states"] == "trained on bfloat16 states"
    assert own["step"] == 100


def test_a_dequantised_target_is_noted(drafter, tmp_path):
    quantised = replace(PROVENANCE, target=PROVENANCE.target.model_copy(update={"quantization": "dequantised Q4_1"}))
    export_drafter(CONFIG, drafter.state_dict(), quantised, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dflash_tools"]["states"] == (
        "trained on dequantised Q4_1"
    )
    assert any(one.warning and "dequantised Q4_1" in one.found for one in check_folder(tmp_path / "out"))


def test_only_the_drafters_own_tensors_are_written_in_bfloat16(drafter, tmp_path):
    """XP-07, XP-08, XP-19: no embedding, head, optimizer or rotary buffer; one dtype, that of the config."""
    folder = export(drafter, tmp_path / "out")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(tensor_shapes(CONFIG.to_dict()))
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_an_export_loads_back_with_equal_outputs(drafter, tmp_path, layout):
    folder = export(drafter, tmp_path / "out", layout=layout)
    config, loaded = load_drafter(folder, num_target_layers=6)
    assert config == CONFIG
    assert torch.equal(drafts(loaded.float())[1], drafts(drafter.to(torch.bfloat16).float())[1])


def test_the_speculators_layout_counts_layers_as_vllm_does_and_says_so(drafter, tmp_path):
    folder = export(drafter, tmp_path / "out", layout="speculators")
    written = json.loads((folder / "config.json").read_text())
    assert written["aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert written["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert written["speculators_config"]["verifier"]["name_or_path"] == "example/target"
    assert [str(one) for one in check_folder(folder) if not one.ok or one.warning] == []
    del written["dflash_tools"]
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="--layer-ids-are zlab"):
        load_drafter(folder)
    assert load_drafter(folder, layer_ids_are="vllm", num_target_layers=6)[0] == CONFIG


def test_a_speculators_checkpoint_with_defaults_left_out_and_copies_of_the_target_loads(tmp_path):
    """As speculators saves it: only what differs from transformers' defaults, nested rope, embedding, head and maps."""
    config = DrafterConfig.from_dict({**CONFIG.to_dict(), "head_dim": 128, "num_key_value_heads": 4})
    model = DFlashDrafter(config)
    model.init_weights(seed=1)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    extra = {
        "embed_tokens.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
        "t2d": torch.ones(64, dtype=torch.bool),
        "d2t": torch.zeros(64, dtype=torch.int64),
    }
    layers = Qwen3Config(
        hidden_size=32,
        vocab_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=48,
        max_position_embeddings=512,
        initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=7,
        use_sliding_window=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ).to_diff_dict()
    layers.pop("head_dim")  # older versions of transformers leave defaults out
    assert "rope_theta" not in layers
    written = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": 64,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": 63,
        "sliding_window_non_causal": False,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    save_file(state | extra, tmp_path / "model.safetensors")
    assert [str(one) for one in check_folder(tmp_path, layer_ids_are="vllm") if not one.ok or one.warning] == []
    loaded_config, loaded = load_drafter(tmp_path, layer_ids_are="vllm", num_target_layers=6)
    assert loaded_config == config
    assert torch.equal(drafts(loaded.float())[1], drafts(model.to(torch.bfloat16).float())[1])


def drafts(model, seed=0):
    """Context, anchor and the slots' logits of one block, on random states and embedding."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(64, 32, generator=generator)
    states = torch.randn(11, 3, 32, generator=generator)
    cache = DrafterCache()
    model.append_context(cache, states[None, :6], torch.arange(6))
    model.append_context(cache, states[None, 6:], torch.arange(6, 11))
    ids = torch.tensor([[5, 63, 63, 63]])
    hidden = model.draft(cache, ids, 11, embedding)
    return (states, embedding), hidden[0, 1:] @ embedding.T


def test_an_independent_reader_of_the_folder_drafts_the_same(drafter, tmp_path):
    folder = export(drafter, tmp_path / "out")
    (states, embedding), logits = drafts(load_drafter(folder)[1].float())
    other = Reader(folder).draft(states, 5, embedding, embedding)
    torch.testing.assert_close(logits.double(), other, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), other.argmax(-1))


@pytest.mark.parametrize("released", [qwen3_8b, qwen36_27b, qwen35_35b_a3b])
def test_released_drafters_load_and_agree_with_the_independent_reader(tmp_path, released):
    folder = write_released(tmp_path, released())
    config, model = load_drafter(folder)
    assert config.num_hidden_layers == released()["num_hidden_layers"]
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(9, len(config.target_layer_ids), 32, generator=generator)
    embedding, cache = torch.randn(64, 32, generator=generator), DrafterCache()
    model.float().append_context(cache, states[None], torch.arange(9))
    hidden = model.draft(cache, torch.tensor([[5] + [63] * 15]), 9, embedding)
    other = Reader(write_with_nested_block(tmp_path)).draft(states, 5, embedding, embedding)
    torch.testing.assert_close((hidden[0, 1:] @ embedding.T).double(), other, rtol=1e-4, atol=1e-3)


def write_with_nested_block(folder):
    config = json.loads((folder / "config.json").read_text())
    config["block_size"] = config.get("block_size", config["dflash_config"].get("block_size"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_used_folder_a_missing_tensor_and_infinity_are_refused_and_leave_nothing(drafter, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        export(drafter, tmp_path / "used")
    state = drafter.state_dict()
    with pytest.raises(ConfigError, match=r"missing \['norm.weight'\]"):
        export_drafter(CONFIG, {k: v for k, v in state.items() if k != "norm.weight"}, PROVENANCE, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"fc.weight holds NaN or infinity"):
        export_drafter(CONFIG, {**state, "fc.weight": state["fc.weight"] * float("inf")}, PROVENANCE, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]


def test_a_mask_token_that_was_chosen_although_it_is_eos_is_exported_with_a_warning(drafter, tmp_path):
    chosen = replace(CONFIG, mask_token_id=2)
    warnings = export_drafter(chosen, drafter.state_dict(), PROVENANCE, tmp_path / "out")
    assert warnings == ["FAULT mask_token_id is neither pad nor eos: 2; expected none of [2]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"is_causal": False}, "is_causal"),
        ({"projector_type": "domino"}, "domino"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "yarn"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e7}}, "partial_rotary_factor"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"input_embedding_scale": 32.0}, "input_embedding_scale"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"rope_theta": None}, "rope_theta is not stated"),
        ({"head_dim": None}, "head_dim missing"),
    ],
)
def test_forms_that_are_not_run_here_are_refused_by_name(tmp_path, change, message):
    folder = write_released(tmp_path, qwen36_27b())
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        released_config(read_checkpoint_file(folder))


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    folder = write_released(tmp_path, qwen3_8b())
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="15 of another shape"):
        load_drafter(folder)


def test_training_can_start_from_an_export_of_the_same_drafter(drafter, tmp_path):
    folder = export(drafter, tmp_path / "out")
    weights = initial_weights(folder, replace(CONFIG, block_size=8))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16).float())


def test_training_refuses_to_start_from_another_drafter_and_names_both_values(drafter, tmp_path):
    folder = export(drafter, tmp_path / "out")
    other = replace(CONFIG, target_layer_ids=(0, 1, 3), mask_token_id=62)
    with pytest.raises(ConfigError, match=r"mask_token_id 63 there, 62 here, target_layer_ids \[0, 2, 3\] there"):
        initial_weights(folder, other)
