"""Rules over ``config.json`` of a drafter. Each names a way in which engines were seen to go wrong without a word."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_tools.drafter.checkpoint_file import OWN_BLOCK, CheckpointFile, LayerIdConvention
from dflash_tools.drafter.checkpoint_view import formula_layer_ids, rope_thetas, speculators_layers
from dflash_tools.drafter.finding import Finding, fault_unless, warn_unless
from dflash_tools.drafter.reread import reread_differences

ARCHITECTURES = {"zlab": "DFlashDraftModel", "speculators": "DFlashSpeculator"}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# Keys of successors and variants; a plain DFlash reader would drop what they stand for.
VARIANT_KEYS = (
    "projector_type",
    "selector_rank",
    "conv_kernel_size",
    "markov_rank",
    "use_swa",
    "quantization_config",
    "input_embedding_scale",
    "sample_from_anchor",
)
PLAIN_VARIANTS = (("projector_type", "dflash"), ("input_embedding_scale", 1))
CAUSAL_KEYS = ("is_causal", "causal", "sliding_window_non_causal")
MASK_IS_RESERVED = "mask_token_id is neither pad nor eos"
LAYER_IDS = "layer ids count decoder layers from 0"


def check_config(file: CheckpointFile, view: Mapping[str, Any], convention: LayerIdConvention | None) -> list[Finding]:
    """Check a config.

    Args:
        file: The drafter folder.
        view: Its config by the keys of the z-lab layout.
        convention: How its layer ids count; None where it cannot tell.
    """
    layers = layer_config(file)
    return [
        *_identity(file, layers),
        *_block(file),
        *_mask_token(file, view),
        *_layer_ids(file, view, convention),
        *_sizes(layers, view),
        *_rope(file, layers),
        *_layer_types(layers, view),
        *_attention(file, layers),
        *_rest(file, layers, view),
    ]


def layer_config(file: CheckpointFile) -> dict[str, Any]:
    """The part of a config that transformers reads as a Qwen3 config."""
    if file.layout == "zlab":
        return file.config
    return speculators_layers(file.config)


def attention_is_plain(overrides: Mapping[str, Any], layer_types: Sequence[str]) -> bool:
    """Tell whether overrides of a block's direction change nothing.

    Plain DFlash: full layers see the whole block, sliding ones only its past.
    """
    sliding, full = "sliding_attention" in layer_types, set(layer_types) != {"sliding_attention"}
    causal = [overrides[key] for key in ("is_causal", "causal") if key in overrides]
    if any((value and full) or (not value and sliding) for value in causal):
        return False
    return not (overrides.get("sliding_window_non_causal") and sliding)


def direction_overrides(file: CheckpointFile) -> dict[str, Any]:
    """Find the keys that turn the direction of attention inside a block; the top level wins."""
    places = (file.config.get("dflash_config") or {}, file.config)
    return {key: place[key] for place in places for key in CAUSAL_KEYS if place.get(key) is not None}


def variant_keys(file: CheckpointFile) -> dict[str, Any]:
    """Find the keys of successors and variants that a plain DFlash reader does not know."""
    places = (file.config.get("dflash_config") or {}, file.config)
    found = {key: place[key] for place in places for key in VARIANT_KEYS if place.get(key)}
    return {key: value for key, value in found.items() if (key, value) not in PLAIN_VARIANTS}


def rope_types(layers: Mapping[str, Any]) -> set[str]:
    """Find every statement of the rotary type; "default" where there is none."""
    return {str(part.get("rope_type", part.get("type", "default"))) for part in _rope_parts(layers)} or {"default"}


def rope_extras(layers: Mapping[str, Any]) -> list[str]:
    """Name the keys that rotate anything but the full head at one position."""
    parts = _rope_parts(layers)
    sections = {key for part in parts for key in part if key.startswith("mrope")}
    partial = any(part.get("partial_rotary_factor") not in (None, 1) for part in (*parts, layers))
    return [*sorted(sections), *["partial_rotary_factor"] * partial]


def _rope_parts(layers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [layers[key] for key in ("rope_scaling", "rope_parameters") if layers.get(key)]


def _identity(file: CheckpointFile, layers: Mapping[str, Any]) -> list[Finding]:
    expected, architectures = [ARCHITECTURES[file.layout]], file.config.get("architectures")
    model_type = layers.get("model_type")
    named = sorted({str(code).split(".")[0] for code in (file.config.get("auto_map") or {}).values()})
    absent = [f"{name}.py" for name in named if not (file.folder / f"{name}.py").is_file()]
    code = f"names {', '.join(f'{name}.py' for name in named) or 'none'}"
    without = f"no auto_map without {', '.join(absent)}"
    return [
        fault_unless(architectures == expected, "architecture", architectures, expected),
        fault_unless(model_type == "qwen3", "model_type", model_type, "qwen3, the layers that engines run"),
        fault_unless(not absent, "auto_map names files that are there", code, without),
    ]


def _block(file: CheckpointFile) -> list[Finding]:
    nested = file.config.get("dflash_config") or {}
    stated = {"top level": file.config.get("block_size"), "dflash_config": nested.get("block_size")}
    sizes = {value for value in stated.values() if value is not None}
    found = ", ".join(f"{value} ({place})" for place, value in stated.items() if value is not None) or "nowhere"
    valid = len(sizes) == 1 and all(isinstance(size, int) and size >= 2 for size in sizes)
    findings = [fault_unless(valid, "block_size is stated and unambiguous", found, "one whole number of at least 2")]
    if file.layout == "zlab":
        both = "top level and dflash_config: readers differ"
        findings.append(warn_unless(None not in stated.values(), "block_size in both places", found, both))
    return findings


def _mask_token(file: CheckpointFile, view: Mapping[str, Any]) -> list[Finding]:
    mask, rows = view.get("mask_token_id"), view.get("vocab_size")
    inside = isinstance(mask, int) and isinstance(rows, int) and 0 <= mask < rows
    own = file.config.get(OWN_BLOCK) or {}
    taken = {*_as_list(view.get("eos_token_id")), *_as_list(own.get("eos_token_ids"))}
    taken |= {*_as_list(view.get("pad_token_id")), *_as_list(own.get("pad_token_id"))}
    findings = [
        fault_unless(mask is not None, "mask_token_id is stated", mask, "an id: servers guess one and drafts collapse"),
        fault_unless(inside, "mask_token_id is an embedding row", f"{mask} of {rows} rows", "below vocab_size"),
        fault_unless(mask not in taken, MASK_IS_RESERVED, mask, f"none of {sorted(taken)}"),
    ]
    if file.layout == "zlab" and mask is not None:
        where = "dflash_config" if "mask_token_id" in (file.config.get("dflash_config") or {}) else "top level"
        findings.append(warn_unless(where == "dflash_config", "mask_token_id in dflash_config", where, "dflash_config"))
    return findings


def _layer_ids(file: CheckpointFile, view: Mapping[str, Any], convention: LayerIdConvention | None) -> list[Finding]:
    if convention is None:
        found = f"{file.config.get('aux_hidden_state_layer_ids')}, and the file cannot tell how they count"
        ask = "--layer-ids-are zlab (decoder layers from 0) or vllm (entries of hidden_states, one more)"
        return [fault_unless(False, LAYER_IDS, found, ask)]
    ids, depth = view.get("target_layer_ids"), view.get("num_target_layers")
    if not ids or not all(isinstance(layer_id, int) for layer_id in ids):
        return [fault_unless(False, "target_layer_ids are stated", ids, "a list of decoder layers")]
    shown, distinct = list(ids), len(set(ids)) == len(ids) and min(ids) >= 0
    findings = [
        fault_unless(True, "target_layer_ids are stated", shown),
        fault_unless(distinct, "target_layer_ids are distinct", shown, "each once, from 0"),
        warn_unless(shown == sorted(ids), "target_layer_ids ascend", shown, "the order of fc's input"),
    ]
    if isinstance(depth, int):
        inner = f"0 to {depth - 2}: the last layer's entry of hidden_states is normed"
        shifted = [layer_id + 1 for layer_id in formula_layer_ids(depth, len(ids))]
        usual = f"not the usual layers plus one, as vLLM counts: {shifted}"
        place = f"{shown} of {depth} layers"
        findings += [
            fault_unless(max(ids) < depth - 1, "target_layer_ids end before the last layer", place, inner),
            warn_unless(shown != shifted, LAYER_IDS, place, usual),
        ]
    return findings


def _sizes(layers: Mapping[str, Any], view: Mapping[str, Any]) -> list[Finding]:
    wrong = [key for key in SIZES if not isinstance(view.get(key), int) or view[key] < 1]
    queries, keys, head_dim = view.get("num_attention_heads"), view.get("num_key_value_heads"), layers.get("head_dim")
    grouped = isinstance(queries, int) and isinstance(keys, int) and keys > 0 and queries % keys == 0
    found = f"missing {', '.join(wrong)}" if wrong else "all"
    return [
        fault_unless(not wrong, "layer sizes are stated", found, "whole numbers"),
        fault_unless(head_dim is not None, "head_dim is stated", head_dim, "a number: the default is 128"),
        fault_unless(grouped, "query heads are a multiple of key heads", f"{queries} and {keys}"),
    ]


def _rope(file: CheckpointFile, layers: Mapping[str, Any]) -> list[Finding]:
    thetas = rope_thetas(layers)
    found = ", ".join(f"{key} = {theta:g}" for key, theta in thetas.items()) or "nowhere"
    both = file.layout == "speculators" or {"rope_theta", "rope_parameters.rope_theta"} <= thetas.keys()
    kinds, extra = rope_types(layers), rope_extras(layers)
    neox = layers.get("is_neox_style", "not stated")
    inherited = "no M-RoPE sections and the full head: a drafter inherits neither"
    return [
        fault_unless(bool(thetas), "rope_theta is stated", found, "a number: a missing one loads as 10,000"),
        fault_unless(len(set(thetas.values())) <= 1, "rope_theta is the same everywhere", found, "one value"),
        warn_unless(both, "rope_theta in both styles", found, "flat for engines and inside rope_parameters"),
        fault_unless(
            kinds == {"default"}, "rope type is default", ", ".join(sorted(kinds)), "no scaling: not inherited"
        ),
        fault_unless(not extra, "rotary embedding is plain", ", ".join(extra) or "plain", inherited),
        fault_unless(neox in (True, "not stated"), "rotary halves, not interleaved", neox, True),
    ]


def _layer_types(layers: Mapping[str, Any], view: Mapping[str, Any]) -> list[Finding]:
    rule, types, depth = "layer_types names every layer", layers.get("layer_types"), view.get("num_hidden_layers")
    known = isinstance(types, list) and set(types) <= {"full_attention", "sliding_attention"}
    findings = [fault_unless(known and len(types or ()) == depth, rule, types, f"{depth} entries")]
    if "sliding_attention" in (types or ()):
        window, used = layers.get("sliding_window"), layers.get("use_sliding_window")
        stated = isinstance(window, int) and window > 0
        findings += [
            fault_unless(stated, "sliding_window is stated", window, "a number of tokens"),
            fault_unless(used is True, "use_sliding_window is true", used, "true: else transformers drops the window"),
        ]
    return findings


def _attention(file: CheckpointFile, layers: Mapping[str, Any]) -> list[Finding]:
    overrides, bias, act = direction_overrides(file), layers.get("attention_bias"), layers.get("hidden_act", "silu")
    rule = "sliding layers are causal inside a block, full layers are not"
    plain = attention_is_plain(overrides, layers.get("layer_types") or ())
    return [
        fault_unless(plain, rule, overrides or "no override", "no override: plain DFlash has no other form"),
        fault_unless(act == "silu", "hidden_act", act, "silu"),
        fault_unless(not bias, "attention_bias", bias, "false"),
    ]


def _rest(file: CheckpointFile, layers: Mapping[str, Any], view: Mapping[str, Any]) -> list[Finding]:
    variants, rows, tied = variant_keys(file), view.get("vocab_size"), layers.get("tie_word_embeddings")
    drafted = file.config.get("draft_vocab_size", rows)
    differences = reread_differences(layers) if layers.get("model_type") == "qwen3" else ["model_type is not qwen3"]
    target = (file.config.get(OWN_BLOCK) or {}).get("target")
    findings = [
        fault_unless(not variants, "plain DFlash, no variant", variants or "plain", "none of these keys"),
        fault_unless(drafted == rows, "the whole vocabulary is drafted", drafted, rows),
        warn_unless(not tied, "tie_word_embeddings", tied, "false: a drafter has no head"),
        fault_unless(not differences, "transformers reads the config as written", "; ".join(differences) or "all keys"),
    ]
    if target is not None:
        weights = target.get("quantization")
        rule, expected = "full-precision target states", "states of the served weights"
        findings.append(warn_unless(weights is None, rule, weights or "full precision", expected))
    return findings


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
