import json
from dataclasses import replace

import pytest
import torch
from published_drafters import qwen3_8b, qwen35_35b_a3b, qwen36_27b, write_released
from safetensors.torch import load_file, save_file

from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.drafter.check import TargetFacts, check_folder
from dflash_tools.drafter.checkpoint_view import formula_layer_ids
from dflash_tools.errors import ConfigError


def faults(folder, *args, **kwargs):
    return {one.rule: one for one in check_folder(folder, *args, **kwargs) if not one.ok}


def warnings(folder, *args, **kwargs):
    return {one.rule: one for one in check_folder(folder, *args, **kwargs) if one.warning}


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.fixture
def released(tmp_path):
    return write_released(tmp_path / "drafter", qwen36_27b())


@pytest.mark.parametrize("config", [qwen3_8b, qwen36_27b, qwen35_35b_a3b])
def test_released_configs_have_no_fault(tmp_path, config):
    folder = write_released(tmp_path, config())
    assert faults(folder) == {}
    assert set(warnings(folder)) == {"block_size in both places", "rope_theta in both styles"}


@pytest.mark.parametrize(
    ("depth", "ids"),
    [(36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61)), (40, (1, 6, 11, 16, 22, 27, 32, 37)), (30, (15,))],
)
def test_the_layer_formula_gives_the_published_ids(depth, ids):
    assert formula_layer_ids(depth, len(ids)) == ids


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "architecture"),  # XP-11
        (lambda c: c.update(architectures=["Qwen3DSparkModel"]), "architecture"),
        (lambda c: c.update(auto_map={"AutoModel": "dflash.DFlashDraftModel"}), "auto_map names files that are there"),
        (lambda c: c.update(block_size=8), "block_size is stated and unambiguous"),  # XP-01
        (lambda c: c["dflash_config"].pop("block_size"), "block_size is stated and unambiguous"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is stated"),  # XP-02
        (lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids are stated"),  # XP-02
        (lambda c: c["dflash_config"].update(mask_token_id=64), "mask_token_id is an embedding row"),  # XP-14
        (lambda c: c["dflash_config"].update(mask_token_id=2), "mask_token_id is neither pad nor eos"),
        (lambda c: c.update(pad_token_id=63), "mask_token_id is neither pad nor eos"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[1, 16, 31, 46, 63]),
            "target_layer_ids end before the last layer",
        ),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 1, 31, 46, 61]), "target_layer_ids are distinct"),
        (lambda c: c.pop("head_dim"), "head_dim is stated"),
        (lambda c: c.pop("rope_theta"), "rope_theta is stated"),  # XP-04
        (lambda c: c.update(rope_parameters={"rope_theta": 1e4}), "rope_theta is the same everywhere"),  # XP-04
        (lambda c: c.update(rope_scaling={"mrope_section": [1, 1, 2]}), "rotary embedding is plain"),
        (lambda c: c.update(partial_rotary_factor=0.25), "rotary embedding is plain"),
        (lambda c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7}), "rope type is default"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type is default"),
        (lambda c: c.update(is_neox_style=False), "rotary halves, not interleaved"),  # XP-05
        (lambda c: c.update(layer_types=["full_attention"]), "layer_types names every layer"),
        (lambda c: c.pop("layer_types"), "layer_types names every layer"),
        (lambda c: c.update(use_sliding_window=False), "use_sliding_window is true"),
        (lambda c: c.update(use_sliding_window=False), "transformers reads the config as written"),
        (lambda c: c.update(sliding_window=None), "sliding_window is stated"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
        (lambda c: c.update(attention_bias=True), "attention_bias"),
        (lambda c: c.update(is_causal=False), "sliding layers are causal inside a block, full layers are not"),
        (lambda c: c["dflash_config"].update(selector_rank=256), "plain DFlash, no variant"),
        (lambda c: c["dflash_config"].update(input_embedding_scale=32.0), "plain DFlash, no variant"),
        (lambda c: c["dflash_config"].update(sample_from_anchor=True), "plain DFlash, no variant"),
        (lambda c: c.update(projector_type="domino"), "plain DFlash, no variant"),
        (lambda c: c.pop("dtype"), "dtype is stated"),
        (lambda c: c.update(dtype="float16"), "dtype is that of every tensor"),  # XP-07
        (lambda c: c.update(intermediate_size=48), "tensor shapes are those of the config"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[1, 16, 31, 46]),
            "tensor shapes are those of the config",
        ),
        (lambda c: c.update(num_hidden_layers=6), "tensors are those of the config"),
    ],
)
def test_a_broken_config_is_named(released, change, rule):
    edit(released, change)
    assert rule in faults(released)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[2, 17, 32, 47, 62]),
            "layer ids count decoder layers from 0",
        ),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (
            lambda c: c.update(dflash_tools={"target": {"quantization": "dequantised Q4_1"}}),
            "full-precision target states",
        ),
        (lambda c: c.update(dflash_tools={"target": {"quantization": "fp8"}}), "full-precision target states"),
    ],
)
def test_a_doubtful_config_is_a_warning_and_no_fault(released, change, rule):
    edit(released, change)
    assert rule in warnings(released)
    assert faults(released) == {}


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def test_a_prefix_on_the_names_is_a_fault(released):
    """Automodel #2913: vLLM adds the prefix itself."""
    path = released / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    assert set(faults(released)) == {"tensor names have no prefix"}


def test_copies_of_the_targets_embedding_are_named_but_served(released):
    """XP-08: engines share the target's embedding and head."""
    change_tensors(released, lambda s: s.update({"embed_tokens.weight": torch.zeros(64, 32, dtype=torch.bfloat16)}))
    assert faults(released) == {}
    assert warnings(released)["no copies of the target's embedding and head"].found == "embed_tokens.weight"


def test_unknown_missing_and_infinite_tensors_are_named(released):
    def change(state):
        state["layers.0.mask_hidden"] = torch.zeros(2, dtype=torch.bfloat16)
        del state["norm.weight"]
        state["fc.weight"][0, 0] = float("inf")

    change_tensors(released, change)
    found = faults(released)
    assert set(found) == {"tensors are those of the config", "every value is finite"}
    assert "1 missing (norm.weight), 1 unknown (layers.0.mask_hidden)" in found["tensors are those of the config"].found
    assert "fc.weight" in str(found["every value is finite"])


def test_a_folder_without_a_drafter_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json; give the folder of a drafter"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        check_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match="damaged"):
        check_folder(tmp_path)


TOKENIZER = TokenizerIdentity(
    fingerprint="a" * 64,
    chat_template_fingerprint="b" * 64,
    num_tokens=60,
    bos_token_id=0,
    eos_token_ids=(2,),
    pad_token_id=1,
    mask_token_id=None,
    control_token_ids=(0, 1, 2),
    used_control_token_ids=(),
)
TARGET = TargetFacts(
    name="Qwen/Qwen3.6-27B",
    revision=None,
    hidden_size=32,
    vocab_size=64,
    num_hidden_layers=64,
    rope_theta=1e7,
    quantization=None,
    tokenizer=TOKENIZER,
)


def test_the_right_target_has_no_fault(released):
    assert faults(released, TARGET) == {}


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        (replace(TARGET, hidden_size=64), "hidden_size is the target's"),
        (replace(TARGET, vocab_size=60), "vocab_size is the target's number of embedding rows"),
        (replace(TARGET, vocab_size=60), "mask_token_id is a row of the target"),
        (replace(TARGET, num_hidden_layers=48), "num_target_layers is the target's depth"),
        (replace(TARGET, num_hidden_layers=62), "layer ids lie inside the target, before its last layer"),
        (
            replace(TARGET, tokenizer=TOKENIZER.model_copy(update={"pad_token_id": 63})),
            "mask_token_id is neither the target's pad nor its eos",
        ),
    ],
)
def test_a_target_that_does_not_fit_is_a_fault(released, target, rule):
    assert rule in faults(released, target)


def test_a_neighbouring_target_is_a_warning_with_both_values(released):
    """XP-17: another revision, quantisation or template is not a fault, but it is said."""
    own = {
        "target": {"model": "Qwen/Qwen3.6-27B", "revision": "abc", "quantization": None},
        "tokenizer_fingerprint": "a" * 64,
        "chat_template_fingerprint": "c" * 64,
    }
    edit(released, lambda c: c.update(dflash_tools=own))
    found = warnings(released, TARGET)
    assert {"same revision", "same chat template"} <= set(found)
    assert not {"same target", "same tokenizer", "same quantisation"} & set(found)
    assert str(found["same revision"]) == "warn  same revision: abc; expected None"


def test_speculators_layer_ids_are_asked_for_where_the_file_cannot_tell(tmp_path):
    config = qwen36_27b()
    nested = config.pop("dflash_config")
    folder = write_released(tmp_path, qwen36_27b())
    layers = {key: value for key, value in config.items() if key not in ("architectures", "num_target_layers")}
    speculators = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "draft_vocab_size": 64,
        "block_size": 16,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in nested["target_layer_ids"]],
        "mask_token_id": 63,
    }
    (folder / "config.json").write_text(json.dumps(speculators))
    assert "--layer-ids-are zlab" in faults(folder)["layer ids count decoder layers from 0"].expected
    assert faults(folder, layer_ids_are="vllm") == {}
    assert faults(folder, TARGET, layer_ids_are="vllm") == {}
    speculators["aux_hidden_state_layer_ids"][0] = 0
    (folder / "config.json").write_text(json.dumps(speculators))
    assert faults(folder) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(dflash_config=[1]), "dflash_config is .*expected an object"),
        (lambda c: c["dflash_config"].update(target_layer_ids="abc"), "target_layer_ids is .*a list of whole numbers"),
        (lambda c: c.update(layer_types=5), "layer_types is 5, expected a list of names"),
        (lambda c: c.update(num_hidden_layers="five"), "num_hidden_layers is 'five', expected a whole number"),
        (lambda c: c.update(rope_parameters=[]), "rope_parameters is .*expected an object"),
    ],
)
def test_values_of_a_wrong_kind_are_one_sentence(released, change, words):
    edit(released, change)
    with pytest.raises(ConfigError, match=words):
        check_folder(released)
