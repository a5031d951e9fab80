"""A sample as a person reads it: what is supervised in colour, control tokens visible."""

from typing import TYPE_CHECKING

from rich.text import Text

from dflash_tools.data.sample import TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPERVISED_STYLE = "green"
CONTROL_STYLE = "reverse"


def show_sample(tokenizer: "PreTrainedTokenizerBase", sample: TokenSample, *, max_tokens: int | None = None) -> Text:
    """Decode a sample for the terminal.

    Args:
        tokenizer: The tokenizer that made it.
        sample: The sample.
        max_tokens: Show only this many tokens.

    Returns:
        Supervised tokens in green, control tokens reversed.
    """
    control_ids = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    text = Text()
    ids, mask = sample.input_ids[:max_tokens].tolist(), sample.loss_mask[:max_tokens].tolist()
    start = 0
    for end in range(1, len(ids) + 1):
        kind = (mask[start], ids[start] in control_ids)
        # Tokens of one kind are decoded together: one character may take several tokens.
        if end < len(ids) and (mask[end], ids[end] in control_ids) == kind:
            continue
        supervised, control = kind
        style = " ".join(part for part, wanted in ((SUPERVISED_STYLE, supervised), (CONTROL_STYLE, control)) if wanted)
        text.append(str(tokenizer.decode(ids[start:end], skip_special_tokens=False)), style=style)
        start = end
    if len(ids) < len(sample.input_ids):
        text.append(f" ... {len(sample.input_ids) - len(ids)} more tokens", style="dim")
    return text
