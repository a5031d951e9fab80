"""Which embedding row stands for a token to draft."""

from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.errors import ConfigError


def choose_mask_token(explicit: int | None, tokenizer: TokenizerIdentity, vocab_size: int) -> int:
    """Choose a real row of the target's embedding that no text ever uses.

    In order: the one given; the tokenizer's own mask token; the first embedding row past the tokenizer; the last
    control token that does not occur in the cached data (tokenizers put their reserved tokens last). Begin, end and
    padding tokens are taken only when given explicitly.

    Args:
        explicit: ``drafter.mask_token_id``.
        tokenizer: Identity of the target's tokenizer.
        vocab_size: Rows of the target's embedding.

    Raises:
        ConfigError: If the given id is no row, or nothing is left to choose.
    """
    if explicit is not None:
        if not 0 <= explicit < vocab_size:
            raise ConfigError(
                f"drafter.mask_token_id = {explicit} is no row of the target's embedding ({vocab_size} rows); "
                "choose one below that"
            )
        return explicit
    taken = {
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        *tokenizer.eos_token_ids,
        *tokenizer.used_control_token_ids,
    }
    own = tokenizer.mask_token_id
    if own is not None and own < vocab_size and own not in taken:
        return own
    # Added tokens may lie past the count where the numbering has gaps.
    first_free = max([tokenizer.num_tokens, *(token + 1 for token in tokenizer.control_token_ids)])
    if first_free < vocab_size:
        return first_free
    unused = [token for token in tokenizer.control_token_ids if token not in taken and token < vocab_size]
    if unused:
        return max(unused)
    raise ConfigError(
        "no mask token: the tokenizer has none, it fills all "
        f"{vocab_size} embedding rows, and every control token occurs in the data; "
        "set drafter.mask_token_id to a row that your text never uses"
    )
