"""Which decoder layers are cached, counted from 0; layer i's output is entry i + 1 of transformers' hidden_states."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from dflash_tools.errors import ConfigError


def choose_layers(
    target_layer_ids: Literal["auto"] | Sequence[int], num_target_features: int, num_hidden_layers: int
) -> tuple[int, ...]:
    """Resolve ``target_layer_ids``.

    The formula is that of the released DFlash drafters: one layer -> [m // 2], else round(1 + i (m - 4) / (K - 1)).

    Args:
        target_layer_ids: "auto" for the formula, or explicit ids.
        num_target_features: Number of layers K that the formula chooses.
        num_hidden_layers: Decoder layers m of the target.

    Returns:
        Layer ids, ascending for the formula, in the given order otherwise.

    Raises:
        ConfigError: If an id is not in 0..m-2, is repeated, or the target has too few layers for the formula.
    """
    last_allowed = num_hidden_layers - 2
    if target_layer_ids == "auto":
        layer_ids = _formula(num_target_features, num_hidden_layers)
        ascending = all(left < right for left, right in pairwise(layer_ids))
        if not ascending or layer_ids[0] < 0 or layer_ids[-1] > last_allowed:
            raise ConfigError(
                f"target.num_target_features = {num_target_features}: a target of {num_hidden_layers} layers has no "
                f"{num_target_features} distinct layers by the DFlash formula (it gives {list(layer_ids)}, usable are "
                f"0 to {last_allowed}); ask for fewer, or list target.target_layer_ids"
            )
        return layer_ids
    layer_ids = tuple(target_layer_ids)
    where = f"target.target_layer_ids = {list(layer_ids)}"
    if not layer_ids:
        raise ConfigError(f"{where}: empty; list at least one layer, or use auto")
    for layer in layer_ids:
        if layer == num_hidden_layers - 1:
            raise ConfigError(
                f"{where}: {layer} is the last layer, whose entry in hidden_states is after the final norm, so serving "
                f"engines disagree about it; use layers 0 to {last_allowed}"
            )
        if not 0 <= layer <= last_allowed:
            raise ConfigError(
                f"{where}: {layer} is not a decoder layer that can be cached; the target has {num_hidden_layers} "
                f"layers counted from 0, use 0 to {last_allowed}"
            )
    repeated = sorted({layer for layer in layer_ids if layer_ids.count(layer) > 1})
    if repeated:
        raise ConfigError(f"{where}: {repeated[0]} is listed more than once; list each layer once")
    return layer_ids


def _formula(num_features: int, num_layers: int) -> tuple[int, ...]:
    if num_features == 1:
        return (num_layers // 2,)
    # Python's round, ties to even: part of the formula.
    return tuple(round(1 + i * (num_layers - 4) / (num_features - 1)) for i in range(num_features))
