"""Rules that pair a drafter with the target it is to serve with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.drafter.checkpoint_file import OWN_BLOCK, CheckpointFile
from dflash_tools.drafter.checkpoint_view import rope_thetas
from dflash_tools.drafter.finding import Finding, fault_unless, warn_unless


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What the config and the tokenizer of a target say; no weights are needed.

    Attributes:
        name: As the user gave it.
        revision: The revision that was read, if any.
        hidden_size: Width of its hidden states.
        vocab_size: Rows of its embedding.
        num_hidden_layers: Depth.
        rope_theta: Base of its rotary embedding, if it has a single one.
        quantization: What its weights are dequantised from, e.g. ``Q4_1``; None for full precision.
        tokenizer: Its tokenizer and chat template.
    """

    name: str
    revision: str | None
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    rope_theta: float | None
    quantization: str | None
    tokenizer: TokenizerIdentity


def check_target(file: CheckpointFile, view: Mapping[str, Any], target: TargetFacts) -> list[Finding]:
    """Check that a drafter belongs to a target.

    Args:
        file: The drafter folder.
        view: Its config by the keys of the z-lab layout.
        target: The target.
    """
    return [*_fits(view, target), *_same_target(file, target)]


def _fits(view: Mapping[str, Any], target: TargetFacts) -> list[Finding]:
    ids, mask = view.get("target_layer_ids") or (), view.get("mask_token_id")
    tokenizer = target.tokenizer
    taken = {*tokenizer.eos_token_ids, tokenizer.pad_token_id}
    depth = view.get("num_target_layers")
    thetas = set(rope_thetas(view).values())
    return [
        fault_unless(
            view.get("hidden_size") == target.hidden_size,
            "hidden_size is the target's",
            view.get("hidden_size"),
            target.hidden_size,
        ),
        fault_unless(
            view.get("vocab_size") == target.vocab_size,
            "vocab_size is the target's number of embedding rows",
            view.get("vocab_size"),
            f"{target.vocab_size}: vLLM builds a broken token map otherwise",
        ),
        fault_unless(
            depth in (None, target.num_hidden_layers),
            "num_target_layers is the target's depth",
            depth,
            target.num_hidden_layers,
        ),
        fault_unless(
            bool(ids) and max(ids) <= target.num_hidden_layers - 2,
            "layer ids lie inside the target, before its last layer",
            list(ids),
            f"0 to {target.num_hidden_layers - 2}",
        ),
        fault_unless(
            isinstance(mask, int) and mask < target.vocab_size,
            "mask_token_id is a row of the target",
            mask,
            f"below {target.vocab_size}",
        ),
        fault_unless(
            mask not in taken, "mask_token_id is neither the target's pad nor its eos", mask, "a reserved token"
        ),
        warn_unless(
            not isinstance(mask, int) or mask >= tokenizer.num_tokens or mask in tokenizer.control_token_ids,
            "mask_token_id is a reserved row or a control token",
            mask,
            "not a token of ordinary text",
        ),
        warn_unless(
            target.rope_theta is None or thetas <= {target.rope_theta},
            "rope_theta is the target's",
            sorted(thetas),
            target.rope_theta,
        ),
    ]


def _same_target(file: CheckpointFile, target: TargetFacts) -> list[Finding]:
    own = file.config.get(OWN_BLOCK)
    if own is None:
        named = (file.config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
        return [
            warn_unless(False, "the checkpoint says which target it was trained for", named or "nothing", target.name)
        ]
    trained, tokenizer = own.get("target") or {}, target.tokenizer
    pairs = {
        "same target": (trained.get("model"), target.name),
        "same revision": (trained.get("revision"), target.revision),
        "same quantisation": (trained.get("quantization"), target.quantization),
        "same tokenizer": (own.get("tokenizer_fingerprint"), tokenizer.fingerprint),
        "same chat template": (own.get("chat_template_fingerprint"), tokenizer.chat_template_fingerprint),
    }
    return [
        warn_unless(found == expected, rule, _short(found), _short(expected))
        for rule, (found, expected) in pairs.items()
    ]


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
