"""One way to look at a drafter's config, whichever layout wrote it: the keys of the z-lab layout."""

from collections.abc import Mapping
from typing import Any

from dflash_tools.drafter.checkpoint_file import OWN_BLOCK, CheckpointFile, LayerIdConvention

# Found inside dflash_config in newer releases and at the top level in older ones; nested wins (SGLang, llama.cpp).
NESTED_FIRST = ("block_size", "mask_token_id", "target_layer_ids")


def layer_id_convention(file: CheckpointFile, given: LayerIdConvention | None) -> LayerIdConvention | None:
    """Tell whether layer ids count decoder layers from 0 (zlab) or entries of ``hidden_states`` (vllm, one more).

    Args:
        file: The drafter folder.
        given: What the user says; it always wins.

    Returns:
        The convention, or None where the file cannot tell: speculators checkpoints exist in both.
    """
    if given is not None:
        return given
    if file.layout == "zlab":
        return "zlab"
    stated = file.config.get(OWN_BLOCK, {}).get("layer_ids_are")
    if stated in ("zlab", "vllm"):
        return "vllm" if stated == "vllm" else "zlab"
    # Entry 0 of hidden_states is the embedding, which no drafter reads: a 0 can only be decoder layer 0.
    return "zlab" if 0 in (file.config.get("aux_hidden_state_layer_ids") or ()) else None


def zlab_view(file: CheckpointFile, convention: LayerIdConvention | None) -> dict[str, Any]:
    """Show a config with the keys of the z-lab layout, all of them at the top level.

    Args:
        file: The drafter folder.
        convention: How its layer ids count; None leaves them out.

    Returns:
        A flat dict: layer sizes, ``block_size``, ``mask_token_id``, ``target_layer_ids`` (decoder layers from 0).
        A key that the file does not state is absent.
    """
    view = _flatten_speculators(file.config) if file.layout == "speculators" else _flatten_zlab(file.config)
    layer_ids = view.pop("target_layer_ids", None)
    if layer_ids is not None and convention is not None:
        shift = 1 if convention == "vllm" else 0
        view["target_layer_ids"] = tuple(layer_id - shift for layer_id in layer_ids)
    return view


def rope_thetas(view: Mapping[str, Any]) -> dict[str, float]:
    """Find every statement of the rotary base: flat, and nested in ``rope_parameters`` or ``rope_scaling``."""
    found: dict[str, float] = {}
    if view.get("rope_theta") is not None:
        found["rope_theta"] = float(view["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        nested = view.get(key)
        if isinstance(nested, Mapping) and nested.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = float(nested["rope_theta"])
    return found


def tensor_shapes(view: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """List the tensors of a DFlash drafter: names without prefix, and shapes.

    Source: the released z-lab checkpoints (58 tensors at five layers).

    Args:
        view: A config with ``hidden_size``, ``target_layer_ids``, ``num_hidden_layers``, head counts, ``head_dim``
            and ``intermediate_size``.
    """
    hidden, head_dim, mlp = view["hidden_size"], view["head_dim"], view["intermediate_size"]
    queries, keys = view["num_attention_heads"] * head_dim, view["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(view["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(view["num_hidden_layers"]):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        shapes.update({f"layers.{layer}.{name}.weight": shape for name, shape in inside.items()})
    return shapes


def _flatten_zlab(config: Mapping[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config") or {}
    view = {key: value for key, value in config.items() if key not in ("dflash_config", OWN_BLOCK)}
    for key in NESTED_FIRST:
        if nested.get(key) is not None:
            view[key] = nested[key]
    return view


def _flatten_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    view = speculators_layers(config)
    for key in ("block_size", "mask_token_id"):
        if config.get(key) is not None:
            view[key] = config[key]
    if config.get("aux_hidden_state_layer_ids") is not None:
        view["target_layer_ids"] = config["aux_hidden_state_layer_ids"]
    view["architectures"] = config.get("architectures")
    view["dtype"] = config.get("dtype") or config.get("torch_dtype") or view.get("dtype")
    return view


def speculators_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``transformer_layer_config``; speculators writes only what differs from transformers' defaults."""
    from transformers import Qwen3Config

    stated = {"model_type": "qwen3", **(config.get("transformer_layer_config") or {})}
    defaults = Qwen3Config(**{key: value for key, value in stated.items() if key != "model_type"}).to_dict()
    return {**defaults, **stated}


def formula_layer_ids(depth: int, count: int) -> tuple[int, ...]:
    """The layers that the DFlash formula chooses: uniform from layer 1 to the third-last, ties to even.

    Source: docs/method.md (the paper: uniform between the second and the third-last layer).

    Args:
        depth: Decoder layers of the target.
        count: Layers to choose.
    """
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))
