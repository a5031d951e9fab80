"""Where SpecForge, speculators and Model-Optimizer keep ids, mask and states of a sample, and in which shape.

Shapes: S tokens, K cached layers, H hidden size.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tools.convert.cache_file import SAFETENSORS, TORCH_SUFFIXES, FileFault
from dflash_tools.errors import ConfigError

LayoutName = Literal["speculators", "specforge", "modelopt"]
NormState = Literal["pre_norm", "post_norm"]

MISSING_KEY = "missing_key"
WRONG_SHAPE = "wrong_shape"
LENGTH_MISMATCH = "length_mismatch"
BAD_VALUES = "bad_values"

_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How a tool lays a sample out in a file.

    Attributes:
        suffixes: Endings of its files.
        ids: Key of the token ids, [S].
        states: Key of the cached layers: [S, K*H], or [S, K+1, H] where ``last`` is None.
        last: Key of the last hidden state, [S, H]; None = it is the last slot of ``states``.
        last_norm: Whether the tool keeps it before or after the final norm.
    """

    suffixes: tuple[str, ...]
    ids: str
    states: str
    last: str | None
    last_norm: NormState


LAYOUTS: dict[LayoutName, CacheLayout] = {
    "speculators": CacheLayout(
        suffixes=(SAFETENSORS,), ids="token_ids", states="hidden_states", last=None, last_norm="pre_norm"
    ),
    "specforge": CacheLayout(
        suffixes=TORCH_SUFFIXES,
        ids="input_ids",
        states="hidden_states",
        last="target_last_hidden_states",
        last_norm="post_norm",
    ),
    "modelopt": CacheLayout(
        suffixes=TORCH_SUFFIXES,
        ids="input_ids",
        states="aux_hidden_states",
        last="hidden_states",
        last_norm="post_norm",
    ),
}
LOSS_MASK = "loss_mask"
CONVERSATION_ID = "conversation_id"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedSample:
    """What a file holds.

    Attributes:
        input_ids: Token ids. Shape: (S,).
        loss_mask: 1 = supervised; None if the file has none. Shape: (S,).
        conversation_id: As the file names it; None if it does not.
        states_SKH: Cached layers in the order of the file.
        last_SH: Last hidden state, if it was asked for.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8] | None
    conversation_id: str | None
    states_SKH: Tensor
    last_SH: Tensor | None


def parse_sample(
    content: dict[str, Any], layout: CacheLayout, *, num_layers: int, hidden_size: int, keep_last: bool
) -> CachedSample:
    """Find the parts of a sample; tensors are viewed, not copied.

    Args:
        content: What the file holds, by name.
        layout: Whose file it is.
        num_layers: Cached layers K that are expected.
        hidden_size: Width H of a state that is expected.
        keep_last: Also find the last hidden state.

    Raises:
        FileFault: If a part is missing, of another length than the ids, or no tensor of the right kind.
        ConfigError: If the states are of another width, count or dtype than expected: the whole cache will be.
    """
    input_ids = _vector(content, layout.ids, "integer")
    if not len(input_ids):
        raise FileFault(WRONG_SHAPE, f"{layout.ids} is empty")
    if input_ids.min() < 0 or input_ids.max() > np.iinfo(np.int32).max:
        raise FileFault(BAD_VALUES, f"{layout.ids} holds {input_ids.min()}..{input_ids.max()}, which are no token ids")
    loss_mask = None
    if LOSS_MASK in content:
        values = _vector(content, LOSS_MASK, "any")
        if not np.isin(values, (0, 1)).all():
            raise FileFault(BAD_VALUES, f"{LOSS_MASK} holds other values than 0 and 1")
        loss_mask = values.astype(np.uint8)
        _check_length(LOSS_MASK, loss_mask, layout.ids, input_ids)
    states_SKH, last_SH = _states(content, layout, num_layers, hidden_size, keep_last)
    _check_length(layout.states, states_SKH, layout.ids, input_ids)
    if last_SH is not None:
        _check_length(str(layout.last or layout.states), last_SH, layout.ids, input_ids)
    conversation_id = content.get(CONVERSATION_ID)
    return CachedSample(
        input_ids=input_ids.astype(np.int32),
        loss_mask=loss_mask,
        conversation_id=None if conversation_id is None else str(conversation_id),
        states_SKH=states_SKH,
        last_SH=last_SH,
    )


def to_bits(states: Tensor) -> NDArray[np.uint16]:
    """bfloat16 bit patterns of states, in memory of their own; other dtypes are rounded. Same shape."""
    rounded = states.to(torch.bfloat16).contiguous()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _states(
    content: dict[str, Any], layout: CacheLayout, num_layers: int, hidden_size: int, keep_last: bool
) -> tuple[Tensor, Tensor | None]:
    if layout.last is None:
        states_SLH = _matrix(content, layout.states, 3)
        if states_SLH.shape[1:] != (num_layers + 1, hidden_size):
            raise ConfigError(
                f"{layout.states} is {_shape(states_SLH)}, expected [tokens, {num_layers + 1}, {hidden_size}]: the "
                f"{num_layers} layers of --target-layer-ids and the last hidden state, of the target's width; give the "
                "ids of all slots but the last, and the target that was cached"
            )
        return states_SLH[:, :-1], states_SLH[:, -1] if keep_last else None
    states_SC = _matrix(content, layout.states, 2)
    if states_SC.shape[1] != num_layers * hidden_size:
        raise ConfigError(
            f"{layout.states} is {_shape(states_SC)}, expected [tokens, {num_layers * hidden_size}]: the {num_layers} "
            f"layers of --target-layer-ids, each {hidden_size} wide as the target is; "
            f"{_count_in_words(states_SC.shape[1], hidden_size)}"
        )
    states_SKH = states_SC.reshape(len(states_SC), num_layers, hidden_size)
    if not keep_last:
        return states_SKH, None
    last_SH = _matrix(content, layout.last, 2)
    if last_SH.shape[1] != hidden_size:
        raise ConfigError(f"{layout.last} is {_shape(last_SH)}, expected [tokens, {hidden_size}]; give its own target")
    return states_SKH, last_SH


def _count_in_words(width: int, hidden_size: int) -> str:
    if width % hidden_size:
        return "give the target that was cached"
    return f"the file holds {width // hidden_size} layers, give their ids"


def _matrix(content: dict[str, Any], key: str, num_dims: int) -> Tensor:
    states = _tensor(content, key)
    while states.ndim > num_dims and states.shape[0] == 1:
        states = states[0]
    if states.ndim != num_dims:
        raise FileFault(WRONG_SHAPE, f"{key} is {_shape(states)}, expected {num_dims} dimensions")
    if states.dtype not in _STATE_DTYPES:
        raise ConfigError(
            f"{key} is {_dtype_name(states)}; bfloat16, float16 and float32 can be converted. Write the cache again in "
            "one of these"
        )
    return states


def _vector(content: dict[str, Any], key: str, kind: Literal["integer", "any"]) -> NDArray[Any]:
    values = _tensor(content, key)
    while values.ndim > 1 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 1:
        raise FileFault(WRONG_SHAPE, f"{key} is {_shape(values)}, expected one dimension")
    if values.is_complex() or (kind == "integer" and values.is_floating_point()):
        raise FileFault(BAD_VALUES, f"{key} is {_dtype_name(values)}, expected integers")
    if values.is_floating_point():
        values = values.float()
    # A copy, so that nothing keeps the mapped file open.
    return np.array(values.numpy())


def _tensor(content: dict[str, Any], key: str) -> Tensor:
    if key not in content:
        raise FileFault(MISSING_KEY, f"has no {key}, only {', '.join(sorted(map(str, content))) or 'nothing'}")
    values = content[key]
    if not isinstance(values, Tensor):
        raise FileFault(WRONG_SHAPE, f"{key} is a {type(values).__name__}, expected a tensor")
    if values.layout is not torch.strided:
        raise FileFault(WRONG_SHAPE, f"{key} is sparse, expected a plain tensor")
    return values.detach()


def _check_length(name: str, values: Any, ids: str, input_ids: NDArray[Any]) -> None:
    if len(values) != len(input_ids):
        raise FileFault(LENGTH_MISMATCH, f"{name} is of {len(values)} tokens, {ids} of {len(input_ids)}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
