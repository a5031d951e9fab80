"""Do cached states belong to the target and to the layers that they are said to be of? The target itself tells."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_tools.convert.layouts import NormState
from dflash_tools.convert.sample import Sample
from dflash_tools.errors import ConfigError
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import Target

NUM_TOKENS = 64  # of the sample that is run
UNRELATED = 0.7  # relative error from which two states have nothing to do with each other


@torch.inference_mode()
def check_states(
    target: Target, sample: Sample, layer_ids: Sequence[int], last_norm: NormState | None, name: str
) -> list[float]:
    """Run the target over the first tokens of a sample and find the layer that each cached slot is nearest to.

    Other engines and dtypes round otherwise, so the nearest layer counts, not a tolerance: rounding moves a state away
    from all layers alike.

    Args:
        target: A loaded target.
        sample: Any sample of the cache.
        layer_ids: The layer that each slot is said to be of.
        last_norm: The norm state that the last hidden state is said to be in; None = it is not kept.
        name: The sample's file.

    Returns:
        Relative error of each slot to its layer: the median over tokens.

    Raises:
        ConfigError: If a slot is nearer to another layer, or to none of this target.
    """
    ids_BT = torch.from_numpy(sample.input_ids[:NUM_TOKENS].astype("int64"))[None]
    layers = range(len(target.layers) - 1)
    outputs_TLH = capture_states(target, ids_BT, layers, dtype=torch.float32, last=True)[0].cpu()
    errors = []
    for slot, layer in enumerate(layer_ids):
        cached_TH = sample.states_TKH[:NUM_TOKENS, slot].float()
        by_layer = [relative_error(cached_TH, outputs_TLH[:, other]) for other in layers]
        nearest = min(layers, key=by_layer.__getitem__)
        if by_layer[nearest] > UNRELATED:
            raise ConfigError(
                f"{name}: slot {slot} of its states is near to no layer of {target.identity.model} (relative error "
                f"{by_layer[nearest]:.2g} at best); give --target as it was cached, and check --from"
            )
        if nearest != layer:
            raise ConfigError(
                f"{name}: slot {slot} of its states is the output of layer {nearest} counted from 0 (relative error "
                f"{by_layer[nearest]:.2g}), not of layer {layer} ({by_layer[layer]:.2g}); correct --target-layer-ids "
                "or --layer-ids-are"
            )
        errors.append(by_layer[layer])
    if last_norm is not None and sample.last_TH is not None:
        _check_norm(target, sample.last_TH[:NUM_TOKENS].float(), outputs_TLH[:, -1], last_norm, name)
    return errors


def relative_error(found_TH: Tensor, expected_TH: Tensor) -> float:
    """Median over tokens of |found - expected| / |expected|."""
    error_T = (found_TH - expected_TH).norm(dim=-1) / expected_TH.norm(dim=-1).clamp_min(1e-12)
    return float(error_T.median())


def _check_norm(target: Target, cached_TH: Tensor, output_TH: Tensor, last_norm: NormState, name: str) -> None:
    normed_TH = target.final_norm(output_TH.to(target.device, target.dtype)).float().cpu()
    by_state: dict[NormState, float] = {
        "pre_norm": relative_error(cached_TH, output_TH),
        "post_norm": relative_error(cached_TH, normed_TH),
    }
    nearest = min(by_state, key=by_state.__getitem__)
    if nearest != last_norm or by_state[nearest] > UNRELATED:
        raise ConfigError(
            f"{name}: its last hidden state is off by {by_state['pre_norm']:.2g} before and by "
            f"{by_state['post_norm']:.2g} after the final norm, so it is not {last_norm}; give --last-hidden-state-is "
            f"{nearest}, or leave --keep-last-hidden-state out"
        )
