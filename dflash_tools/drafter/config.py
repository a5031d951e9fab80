"""The drafter's configuration: every value resolved, from the config file, the target and the store."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dflash_tools.config import DrafterSection
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.manifest import StoreManifest
from dflash_tools.drafter.mask_token import choose_mask_token
from dflash_tools.errors import ConfigError

LayerType = Literal["full_attention", "sliding_attention"]

# Decay by block size as published with DFlash (docs/method.md, "Loss").
PUBLISHED_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}

# Keys that give away feed-forward experts, whose widths say nothing about a dense MLP.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# Keys of latent attention, whose head counts and widths do not fit plain grouped-query attention.
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes the drafter's shape and arithmetic; names as in DFlash checkpoints.

    Attributes:
        hidden_size: Width of the residual stream; equals the target's, whose embedding and head are shared.
        vocab_size: Rows of the target's embedding.
        num_hidden_layers: Decoder layers of the drafter.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Width of a head; even.
        intermediate_size: Width of the MLP.
        rms_norm_eps: Epsilon of every norm.
        rope_theta: Base of the rotary embedding.
        max_position_embeddings: Longest position.
        initializer_range: Standard deviation of fresh weights.
        layer_types: One entry per layer.
        sliding_window: Tokens that a sliding layer sees, the query's own included; None without sliding layers.
        block_size: Slots of a block, the anchor included.
        mask_token_id: Embedding row of a slot to draft.
        target_layer_ids: Decoder layers of the target whose output is the context, counted from 0; never the last.
        num_target_layers: Decoder layers of the target.
    """

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ConfigError(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; tuples become lists."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """Read what ``to_dict`` wrote.

        Raises:
            ConfigError: If a key is missing or unknown, or a value does not fit.
        """
        names = {field.name for field in fields(cls)}
        if names != set(values):
            missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
            raise ConfigError(
                f"drafter configuration: missing keys {missing}, unknown keys {unknown}; restore the file"
            )
        restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**restored)

    def fingerprint(self) -> str:
        """Identity of the configuration: 64 hex digits."""
        return fingerprint_of_json(self.to_dict())

    def columns_of(self, stored_layer_ids: Sequence[int]) -> list[int]:
        """Find the drafter's layers among the stored ones.

        Args:
            stored_layer_ids: ``target_layer_ids`` of a store.

        Returns:
            Positions on the layer axis of the stored states, in the drafter's order.

        Raises:
            ConfigError: If the store lacks a layer.
        """
        return _columns(self.target_layer_ids, stored_layer_ids)


def resolve_drafter(
    section: DrafterSection, target_config: Mapping[str, Any], manifest: StoreManifest
) -> DrafterConfig:
    """Fill every value that the config file leaves open.

    Copied from the target: hidden and vocabulary size, longest position, epsilon, rope base, and the MLP width and head
    counts of a dense target. Never inherited: rope scaling, partial or multi-axis rotary embedding, activation, biases.

    Args:
        section: The ``[drafter]`` table.
        target_config: ``config.json`` of the target (``STORE/target/config.json``).
        manifest: The store's manifest.

    Raises:
        ConfigError: If a value cannot be copied and is not given, or values do not fit together.
    """
    target = _text_config(target_config)
    heads = section.num_attention_heads or _dense(target, "num_attention_heads", LATENT_KEYS)
    head_dim = section.head_dim or _head_dim(target, manifest.hidden_size)
    kv_heads = section.num_key_value_heads or _dense(target, "num_key_value_heads", LATENT_KEYS, default=heads)
    target_layer_ids = section.target_layer_ids or manifest.target_layer_ids
    _columns(target_layer_ids, manifest.target_layer_ids)
    return DrafterConfig(
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.target.vocab_size,
        num_hidden_layers=section.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=section.intermediate_size or _dense(target, "intermediate_size", EXPERT_KEYS),
        rms_norm_eps=section.rms_norm_eps or _number(target, "rms_norm_eps", "norm_eps"),
        rope_theta=section.rope_theta or _rope_theta(target),
        max_position_embeddings=section.max_position_embeddings or int(_number(target, "max_position_embeddings")),
        initializer_range=section.initializer_range,
        layer_types=section.layer_types or _all_full(section.num_hidden_layers),
        sliding_window=section.sliding_window,
        block_size=section.block_size,
        mask_token_id=choose_mask_token(section.mask_token_id, manifest.tokenizer, manifest.target.vocab_size),
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=manifest.target.num_hidden_layers,
    )


def resolve_decay_gamma(gamma: float | None, block_size: int) -> float:
    """Give the decay of slot weights: the one asked for, the published one of the block size, or half the block."""
    return gamma if gamma is not None else PUBLISHED_GAMMAS.get(block_size, block_size / 2)


def _problems(config: DrafterConfig) -> list[str]:
    layers, slides = config.num_hidden_layers, "sliding_attention" in config.layer_types
    ids = config.target_layer_ids
    rules = [
        (
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"drafter.num_attention_heads = {config.num_attention_heads} is no multiple of "
            f"num_key_value_heads = {config.num_key_value_heads}; set drafter.num_key_value_heads to a divisor",
        ),
        (config.head_dim % 2 == 0, f"drafter.head_dim = {config.head_dim} is odd; the rotary embedding needs pairs"),
        (
            len(config.layer_types) == layers,
            f"drafter.layer_types has {len(config.layer_types)} entries, expected num_hidden_layers = {layers}",
        ),
        (
            slides == (config.sliding_window is not None),
            f"drafter.sliding_window = {config.sliding_window}, but layer_types "
            f"{'has a sliding layer; give the window' if slides else 'has no sliding layer; remove it'}",
        ),
        (
            0 <= config.mask_token_id < config.vocab_size,
            f"drafter.mask_token_id = {config.mask_token_id} is no row of the target's embedding "
            f"({config.vocab_size} rows); choose one below that",
        ),
        (
            len(ids) > 0 and len(set(ids)) == len(ids) and all(0 <= i <= config.num_target_layers - 2 for i in ids),
            f"drafter.target_layer_ids = {list(ids)}: expected different ids from 0 to {config.num_target_layers - 2}; "
            "the last layer's entry of hidden_states is after the final norm",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _columns(wanted: Sequence[int], stored: Sequence[int]) -> list[int]:
    missing = [layer for layer in wanted if layer not in stored]
    if missing:
        raise ConfigError(
            f"drafter.target_layer_ids asks for layers {missing}, but the store holds {list(stored)}; "
            "choose among those, or extract the missing layers"
        )
    return [list(stored).index(layer) for layer in wanted]


def _all_full(num_hidden_layers: int) -> tuple[LayerType, ...]:
    full: LayerType = "full_attention"
    return (full,) * num_hidden_layers


def _text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Multi-modal targets nest their language model.
    nested = target_config.get("text_config")
    return nested if isinstance(nested, Mapping) else target_config


def _dense(target: Mapping[str, Any], key: str, signs: Sequence[str], default: int | None = None) -> int:
    found = [sign for sign in signs if target.get(sign)]
    value = target.get(key) or default
    if found or not isinstance(value, int):
        reason = f"has {found[0]}, so its shape is not dense" if found else f"has no single {key}"
        raise ConfigError(f"the target's config {reason}; set drafter.{key} explicitly")
    return value


def _head_dim(target: Mapping[str, Any], hidden_size: int) -> int:
    if not target.get("head_dim"):
        heads = _dense(target, "num_attention_heads", LATENT_KEYS)
        if hidden_size % heads:
            raise ConfigError("the target's config has no head_dim; set drafter.head_dim explicitly")
        return hidden_size // heads
    return _dense(target, "head_dim", LATENT_KEYS)


def _number(target: Mapping[str, Any], *keys: str) -> float:
    for key in keys:
        value = target.get(key)
        if isinstance(value, int | float) and value > 0:
            return value
    raise ConfigError(f"the target's config has no {' or '.join(keys)}; set drafter.{keys[0]} explicitly")


def _rope_theta(target: Mapping[str, Any]) -> float:
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    per_type = rope.get("full_attention")
    rope = per_type if isinstance(per_type, Mapping) else rope
    return float(_number({"rope_theta": rope.get("rope_theta") or target.get("rope_theta")}, "rope_theta"))
