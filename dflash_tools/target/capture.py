"""Capture the output of chosen decoder layers by forward hooks; nothing else of the forward is kept.

Shapes: B samples, T tokens, K captured layers, H hidden size.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from dflash_tools.target.load import Target


class Capture:
    """Context manager: while it is open, each forward of the target leaves its chosen states in ``states_BTKH``.

    A layer's output is copied inside the hook, before a later layer could change it in place, so memory grows with
    the captured layers and not with the depth of the target.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, dtype: torch.dtype | None = None) -> None:
        """Args: the target, layers counted from 0, and the dtype of the states (default the target's)."""
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._dtype = dtype or target.dtype
        self._handles: list[Any] = []
        self._states_BTKH: Tensor | None = None

    @property
    def states_BTKH(self) -> Tensor:
        """States of the latest forward. Shape: (B, T, K, H)."""
        assert self._states_BTKH is not None, "no forward was made while the capture was open"
        return self._states_BTKH

    def __enter__(self) -> Self:
        for position, layer in enumerate(self._layer_ids):
            self._handles.append(self._target.layers[layer].register_forward_hook(self._hook(position)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, position: int) -> Any:
        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            state_BTH = output[0] if isinstance(output, tuple) else output
            shape = (state_BTH.shape[0], state_BTH.shape[1], len(self._layer_ids), state_BTH.shape[2])
            if position == self._first_position() or self._states_BTKH is None:
                self._states_BTKH = torch.empty(shape, dtype=self._dtype, device=self._target.device)
            self._states_BTKH[:, :, position].copy_(state_BTH)

        return keep

    def _first_position(self) -> int:
        return self._layer_ids.index(min(self._layer_ids))


class _LastWantedLayerReached(Exception):
    """Ends a forward whose remaining layers nobody needs."""


@torch.inference_mode()
def capture_states(
    target: Target,
    input_ids_BT: Tensor,
    layer_ids: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    last: bool = False,
) -> Tensor:
    """Run the backbone over right-padded samples and return the states of chosen layers.

    No attention mask is used: in a causal model nothing right of a token reaches it, and the self-test proves that for
    the target at hand. States of padding are garbage. No logits are made, and layers after the last chosen one are
    not run.

    Args:
        target: A loaded target.
        input_ids_BT: Token ids, padded on the right with any valid id. Shape: (B, T).
        layer_ids: Decoder layers counted from 0.
        dtype: Of the states; default the target's.
        last: Also capture the output of the last decoder layer, before the final norm, as one more entry.

    Returns:
        States on the target's device. Shape: (B, T, K, H), or (B, T, K + 1, H) with ``last``.
    """
    wanted = (*layer_ids, len(target.layers) - 1) if last else tuple(layer_ids)
    with Capture(target, wanted, dtype=dtype) as capture:
        stop = target.layers[max(wanted)].register_forward_hook(_stop)
        try:
            target.backbone(input_ids=input_ids_BT.to(target.device), use_cache=False)
        except _LastWantedLayerReached:
            pass
        finally:
            stop.remove()
        return capture.states_BTKH


def _stop(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    raise _LastWantedLayerReached
