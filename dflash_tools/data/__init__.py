"""Files of conversations -> normalised messages -> token ids and loss mask; no torch."""

from dflash_tools.data.manifest import ResolvedData, resolve_data
from dflash_tools.data.read import read_rows
from dflash_tools.data.sample import RowResult, TokenSample, sample_id
from dflash_tools.data.show import show_sample
from dflash_tools.data.split import choose_split
from dflash_tools.data.tokenizer import load_tokenizer, tokenizer_identity

__all__ = [
    "ResolvedData",
    "RowResult",
    "TokenSample",
    "choose_split",
    "load_tokenizer",
    "read_rows",
    "resolve_data",
    "sample_id",
    "show_sample",
    "tokenizer_identity",
]
