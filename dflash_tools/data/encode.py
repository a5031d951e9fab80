"""Text with supervised spans -> token ids and loss mask.

A text is cut where a supervised span begins, and each piece is tokenised by itself: what precedes a reply has then the
very ids that serving sends, and no token lies across the border. Inside a piece nothing is cut, as in serving.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import tokenizers
from numpy.typing import NDArray

from dflash_tools.data.marks import TYPED
from dflash_tools.data.template import Span
from dflash_tools.data.turns import MarkedText

# A prefix of this many characters per wanted token is tokenised before the rest of a long text is looked at.
_CHARACTERS_PER_TOKEN = 8
# Tokens at the cut end of a prefix may differ from those of the whole text; these many are not trusted.
_UNSURE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and loss mask of one text.

    Attributes:
        input_ids: Shape: (num_tokens,).
        loss_mask: Shape: (num_tokens,).
        is_cut: The text goes on beyond ``max_tokens``.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    start: int  # of the piece in the text without TYPED marks


class TextEncoder:
    """Tokenises texts; safe to pickle.

    Args:
        tokenizer: A tokenizer without truncation and padding.
        max_tokens: Longest sample.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._newline_ids = self._ids("\n")
        # Some tokenizers begin every text with a space. A piece from inside a text must not get one.
        self._adds_space = self._ids("\na") != self._newline_ids + self._ids("a")
        self.prefix_ids, self.suffix_ids = self._find_affixes()

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Find the ids the tokenizer puts around plain text, such as BOS."""
        plain, whole = self._ids("a"), self._tokenizer.encode("a", add_special_tokens=True).ids
        start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:start], whole[start + len(plain) :]

    def encode_many(self, texts: Sequence[MarkedText]) -> list[Encoded]:
        """Tokenise texts, short ones together."""
        cut_texts = [_cut(text) for text in texts]
        limit = self.max_tokens * _CHARACTERS_PER_TOKEN
        short = [sum(len(piece.text) for piece in pieces) <= limit for pieces, _ in cut_texts]
        batch = [
            self._placed(piece)
            for (pieces, _), is_short in zip(cut_texts, short, strict=True)
            if is_short
            for piece in pieces
        ]
        encodings = iter(self._tokenizer.encode_batch(batch, add_special_tokens=False))
        results = []
        for (pieces, spans), is_short in zip(cut_texts, short, strict=True):
            if is_short:
                results.append(self._assemble(pieces, [next(encodings) for _ in pieces], spans, is_cut=False))
            else:
                results.append(self._encode_long(pieces, spans))
        return results

    def _encode_long(self, pieces: list[_Piece], spans: Sequence[Span]) -> Encoded:
        encodings, is_cut = self._encode_up_to(pieces, self.max_tokens)
        return self._assemble(pieces, encodings, spans, is_cut=is_cut)

    def _encode_up_to(self, pieces: list[_Piece], wanted: int) -> tuple[list[tokenizers.Encoding], bool]:
        """Tokenise pieces until there are more than ``wanted`` tokens; tell whether something is left out."""
        encodings: list[tokenizers.Encoding] = []
        for piece in pieces:
            encoding, is_cut = self._encode_prefix(piece, wanted)
            encodings.append(encoding)
            wanted -= len(encoding.ids) - self._num_lead_ids(piece)
            if is_cut or wanted < 0:
                return encodings, True
        return encodings, False

    def _encode_prefix(self, piece: _Piece, wanted: int) -> tuple[tokenizers.Encoding, bool]:
        """Tokenise as much of a piece as ``wanted`` tokens need; tell whether something is left out."""
        text = self._placed(piece)
        length = max(wanted, _UNSURE_TOKENS) * _CHARACTERS_PER_TOKEN
        while length < len(text):
            encoding = self._tokenizer.encode(text[:length], add_special_tokens=False)
            if len(encoding.ids) >= wanted + _UNSURE_TOKENS + len(self._newline_ids):
                return encoding, True
            length *= 4
        return self._tokenizer.encode(text, add_special_tokens=False), False

    def reach(self, text: str, max_tokens: int) -> int | None:
        """Find how many characters of a text, TYPED marks included, its first tokens take; None = all of them."""
        pieces, _ = _cut(MarkedText(text, ()))
        encodings, is_cut = self._encode_up_to(pieces, max_tokens)
        if not is_cut:
            return None
        for piece, encoding in zip(pieces, encodings, strict=False):
            lead = self._num_lead_ids(piece)
            if len(encoding.ids) - lead > max_tokens:
                end = piece.start + encoding.offsets[max_tokens + lead][0] - (1 if lead else 0)
                marks = (match.start() for match in re.finditer(TYPED, text))
                return end + sum(at - number < end for number, at in enumerate(marks))
            max_tokens -= len(encoding.ids) - lead
        raise AssertionError("some piece holds the last token")

    def fills(self, text: str) -> bool:
        """Tell whether a text alone has at least ``max_tokens`` tokens; a short one is not even tokenised."""
        if len(text) <= self.max_tokens * _CHARACTERS_PER_TOKEN:
            return False
        encoding, is_cut = self._encode_prefix(_Piece(text, 0), self.max_tokens)
        return is_cut or len(encoding.ids) >= self.max_tokens

    def _placed(self, piece: _Piece) -> str:
        return f"\n{piece.text}" if self._num_lead_ids(piece) else piece.text

    def _num_lead_ids(self, piece: _Piece) -> int:
        return len(self._newline_ids) if self._adds_space and piece.start > 0 else 0

    def _assemble(
        self,
        pieces: list[_Piece],
        encodings: list[tokenizers.Encoding],
        spans: Sequence[Span],
        *,
        is_cut: bool,
    ) -> Encoded:
        ids: list[int] = []
        mask_borders: list[tuple[int, int]] = []
        for piece, encoding in zip(pieces, encodings, strict=False):
            lead = self._num_lead_ids(piece)
            for start, end in spans:
                if start < piece.start + len(piece.text) and end > piece.start:
                    # A span begins where a piece begins, or earlier.
                    placed = self._placed(piece)
                    last = _count_tokens(encoding, end - piece.start + len(placed) - len(piece.text), len(placed))
                    mask_borders.append((len(ids), len(ids) + last - lead))
            ids += encoding.ids[lead:]
        input_ids = np.array(ids[: self.max_tokens], dtype=np.int32)
        loss_mask = np.zeros(len(input_ids), dtype=np.uint8)
        for first, last in mask_borders:
            loss_mask[first:last] = 1
        return Encoded(input_ids, loss_mask, is_cut or len(ids) > self.max_tokens)


def _count_tokens(encoding: tokenizers.Encoding, end: int, length: int) -> int:
    """Count the tokens that begin before character ``end`` of a text of ``length`` characters."""
    if end >= length:
        return len(encoding.ids)
    last = encoding.char_to_token(end - 1)
    if last is None:
        # A character that no token holds: white space that was trimmed, or a text tokenised up to here only.
        return sum(start < end for start, _ in encoding.offsets)
    # A character may take several tokens; char_to_token gives the first.
    count = last + 1
    while count < len(encoding) and (span := encoding.token_to_chars(count)) is not None and span[0] < end:
        count += 1
    return count


def _cut(marked: MarkedText) -> tuple[list[_Piece], list[Span]]:
    """Cut a text at span starts and TYPED marks; remove the marks and move the spans."""
    text, spans = marked.text, list(marked.spans)
    cuts = {start for start, _ in spans}
    if TYPED in text:
        marks = [match.start() for match in re.finditer(TYPED, text)]
        spans = [(start - _below(marks, start), end - _below(marks, end)) for start, end in spans]
        cuts = {start for start, _ in spans} | {at - number for number, at in enumerate(marks)}
        text = text.replace(TYPED, "")
    borders = sorted({0, len(text), *cuts})
    return [_Piece(text[a:b], a) for a, b in pairwise(borders)], spans


def _below(marks: list[int], position: int) -> int:
    return int(np.searchsorted(marks, position))
