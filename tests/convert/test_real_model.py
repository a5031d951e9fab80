"""States of SmolLM2-135M, taken from transformers' own tuple in bfloat16, are told apart layer by layer in float32."""

import pytest
import torch
from tiny_models import SMOLLM2

from dflash_tools.config import TargetSection
from dflash_tools.convert.check_states import check_states
from dflash_tools.convert.sample import Sample
from dflash_tools.data import load_tokenizer
from dflash_tools.errors import ConfigError
from dflash_tools.target.load import load_target

TEXT = "A dictionary maps keys to values. Keys are unique, and any hashable object can be one. " * 4


@pytest.mark.slow
def test_every_layer_of_a_real_target_is_told_from_its_neighbour():
    tokenizer = load_tokenizer(SMOLLM2["model"], gguf_file=SMOLLM2["gguf_file"])
    ids = torch.tensor(tokenizer(TEXT)["input_ids"][:64])
    cached = load_target(TargetSection(**SMOLLM2, dtype="bfloat16", device="cpu"))
    with torch.inference_mode():
        states = cached.model(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    target = load_target(TargetSection(**SMOLLM2, dtype="float32", device="cpu"))
    layers = range(len(target.layers) - 1)

    def sample(entries):
        return Sample(
            input_ids=ids.numpy().astype("int32"),
            loss_mask=torch.ones(len(ids), dtype=torch.uint8).numpy(),
            conversation_id="",
            states_TKH=torch.stack([states[entry][0] for entry in entries], dim=1),
            last_TH=states[-1][0],
            notes=(),
        )

    # Entry i + 1 of the tuple is the output of layer i; the last entry is after the final norm.
    errors = check_states(target, sample([layer + 1 for layer in layers]), layers, "post_norm", "cached")
    assert max(errors) < 0.05
    for layer in layers[1:]:
        with pytest.raises(ConfigError, match=f"the output of layer {layer - 1} counted from 0"):
            check_states(target, sample([layer]), [layer], None, "cached")
    with pytest.raises(ConfigError, match="give --last-hidden-state-is post_norm"):
        check_states(target, sample([1]), [0], "pre_norm", "cached")
