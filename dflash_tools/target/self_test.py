"""Prove, on a few tokens, that captured states are what they are said to be. Costs a handful of short forwards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_tools.errors import StoreError
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import Target
from dflash_tools.target.logits import logits_of

NUM_TOKENS = (24, 13, 7)  # lengths of the samples that are run together and alone
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # relative error of a state


@torch.inference_mode()
def self_test(target: Target, layer_ids: Sequence[int], *, batched: bool = True) -> None:
    """Check the captured layers of a target.

    * The hook of layer i gives the input of layer i + 1, and entry i + 1 of ``hidden_states``.
    * A right-padded batch gives the states of each sample alone.
    * Final norm and head of the last layer's output give the model's own logits.
    * No captured layer is all zeros or not finite.

    Args:
        target: A loaded target.
        layer_ids: Captured layers.
        batched: Samples will share forward batches, so that padding must not leak.

    Raises:
        StoreError: Naming layer, finding and what to do.
    """
    ids_BT = probe_ids(target, NUM_TOKENS[0])
    seen = _run_whole(target, ids_BT)
    _check_values(target, seen, layer_ids)
    _check_positions(target, seen, layer_ids)
    _check_logits(target, seen)
    states_BTKH = capture_states(target, ids_BT, layer_ids)
    for k, layer in enumerate(layer_ids):
        if not torch.equal(states_BTKH[:, :, k], seen.outputs[layer].to(states_BTKH.device)):
            raise _fault(target, f"layer {layer} differs between a full forward and one that stops early")
    if batched:
        _check_batch(target, states_BTKH, layer_ids)


def probe_ids(target: Target, num_tokens: int) -> Tensor:
    """Fixed ordinary token ids. Shape: (1, num_tokens)."""
    # Ids a few hundred up are plain text in every vocabulary seen; the first ones are often control tokens.
    vocab_size = target.identity.vocab_size
    ids = [(300 + (7919 * i) % 600) % vocab_size for i in range(num_tokens)]
    return torch.tensor([ids], device=target.device)


class _Seen:
    """What hooks saw in one whole forward: inputs and outputs of every layer, hidden_states, logits."""

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.hidden_states: tuple[Tensor, ...] = ()
        self.logits = torch.empty(0)


def _run_whole(target: Target, ids_BT: Tensor) -> _Seen:
    seen = _Seen()
    handles = []
    for i, layer in enumerate(target.layers):

        def before(module: Any, args: Any, kwargs: Any, i: int = i) -> None:
            seen.inputs[i] = (args[0] if args else kwargs["hidden_states"]).clone()

        def after(module: Any, args: Any, output: Any, i: int = i) -> None:
            seen.outputs[i] = (output[0] if isinstance(output, tuple) else output).clone()

        handles += [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after),
        ]
    try:
        output = target.model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    seen.logits = output.logits
    seen.hidden_states = getattr(output, "hidden_states", None) or ()
    return seen


def _check_positions(target: Target, seen: _Seen, layer_ids: Sequence[int]) -> None:
    if len(seen.hidden_states) != len(target.layers) + 1:
        raise _fault(
            target,
            f"{type(target.model).__name__} returned {len(seen.hidden_states)} hidden_states for "
            f"{len(target.layers)} layers, expected one more than layers",
        )
    for layer in layer_ids:
        output = seen.outputs[layer]
        if not torch.equal(output, seen.inputs[layer + 1].to(output.device)):
            raise _fault(target, f"the output of layer {layer} is not the input of layer {layer + 1}")
        if not torch.equal(output, seen.hidden_states[layer + 1].to(output.device)):
            raise _fault(target, f"the output of layer {layer} is not entry {layer + 1} of hidden_states")


def _check_values(target: Target, seen: _Seen, layer_ids: Sequence[int]) -> None:
    for layer in layer_ids:
        state = seen.outputs[layer]
        if not torch.isfinite(state).all():
            raise StoreError(
                f"target {target.identity.model}: layer {layer} gives infinite or NaN values in "
                f"{target.identity.dtype}; set target.dtype to bfloat16 or float32"
            )
        if not state.any():
            raise _fault(target, f"layer {layer} gives zeros only, so its weights are not loaded on their device")


def _check_logits(target: Target, seen: _Seen) -> None:
    last = len(target.layers) - 1
    ours = logits_of(target, seen.outputs[last].to(seen.hidden_states[-1].device)).float()
    theirs = seen.logits.to(ours.device).float()
    error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-12)
    if not error <= TOLERANCE[target.dtype]:
        raise _fault(
            target,
            f"final norm and head of the last layer's output miss the model's own logits by {error:.2g} (relative), "
            "so the model does more after its layers than a drafter could repeat",
        )


def _check_batch(target: Target, alone_BTKH: Tensor, layer_ids: Sequence[int]) -> None:
    ids_BT = probe_ids(target, NUM_TOKENS[0]).repeat(len(NUM_TOKENS), 1)
    for row, length in enumerate(NUM_TOKENS):
        ids_BT[row, length:] = ids_BT[0, 0]
    together_BTKH = capture_states(target, ids_BT, layer_ids).float()
    for row, length in enumerate(NUM_TOKENS):
        # Causal: the first tokens of the longest sample are the shorter samples.
        expected = alone_BTKH[0, :length].float()
        error_TK = (together_BTKH[row, :length] - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)
        # A quantile, because one expert chosen otherwise for one token is rounding, a leak shows in many.
        error_K = torch.quantile(error_TK, 0.9, dim=0)
        worst = int(error_K.argmax())
        if not error_K[worst] <= TOLERANCE[target.dtype]:
            raise StoreError(
                f"target {target.identity.model}: states of layer {layer_ids[worst]} in a padded batch differ from "
                f"those of the sample alone by {error_K[worst]:.2g} (relative), so padding leaks into them. "
                "Set forward.token_budget = 1: every sample then runs alone"
            )


def _fault(target: Target, finding: str) -> StoreError:
    return StoreError(
        f"target {target.identity.model} ({target.identity.architecture}): {finding}. "
        'Its states cannot be cached rightly; try attn_implementation = "eager", or report this architecture'
    )
