"""Prompts to decode: built-in ones by kind, any JSONL file, a data manifest, or the held-out samples of a store."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_tools.config import DataSection
from dflash_tools.contracts.index import VALIDATION
from dflash_tools.data import TokenSample, read_rows, resolve_data
from dflash_tools.data.messages import normalise_message
from dflash_tools.data.sample import RowError
from dflash_tools.errors import DataError
from dflash_tools.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN_KINDS = ("math", "code", "chat", "extraction", "translation", "long_context")
MIN_PROMPT_TOKENS = 2  # shorter held-out samples say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt.

    Attributes:
        name: Where it comes from: file and line, or sample id.
        kind: Its category in the tables.
        token_ids: What is decoded from.
        continuation: How the data goes on; empty where it does not say.
    """

    name: str
    kind: str
    token_ids: tuple[int, ...]
    continuation: tuple[int, ...] = ()


def builtin_prompts(tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]) -> list[Prompt]:
    """Read the built-in prompts of all kinds.

    Args:
        tokenizer: The target's.
        kwargs: Arguments of the chat template.
    """
    folder = files("dflash_tools.evaluate") / "prompts"
    texts = {kind: (folder / f"{kind}.jsonl").read_text(encoding="utf-8") for kind in BUILTIN_KINDS}
    return [
        prompt
        for kind, text in texts.items()
        for prompt in _read_lines(text, f"builtin {kind}", kind, tokenizer, kwargs)
    ]


def file_prompts(path: Path, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]) -> list[Prompt]:
    """Read prompts from a JSONL file or a data manifest (``.toml``).

    A line holds ``messages`` (or ShareGPT ``conversations``), without the assistant turns at its end, or
    ``prompt``, taken whole, or ``text``, of which the first half is the prompt; ``kind`` is optional. The samples of a
    manifest are made exactly as for extraction and cut before their first supervised token.

    Args:
        path: The file.
        tokenizer: The target's.
        kwargs: Arguments of the chat template, for a JSONL file; a manifest brings its own.

    Raises:
        DataError: If a line cannot be read, or no prompt is left.
        ConfigError: If a manifest does not fit.
    """
    if path.suffix == ".toml":
        prompts = _manifest_prompts(path, tokenizer)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompts {path}: cannot be read as text ({error}); give a JSONL file") from None
        prompts = list(_read_lines(text, path.name, path.stem, tokenizer, kwargs))
    if not prompts:
        raise DataError(f"--prompts {path}: holds no prompt; give lines with messages, prompt or text")
    return prompts


def held_out_prompts(store: Store, max_prompts: int) -> list[Prompt]:
    """Cut held-out samples of a store into prompt and continuation.

    Args:
        store: A finished store.
        max_prompts: At most this many, spread evenly over the index.

    Returns:
        Prompts of kind ``held-out``; empty if the store holds nothing out.
    """
    rows = np.flatnonzero((store.index["split"] == VALIDATION).to_numpy())
    if len(rows) > max_prompts:
        rows = rows[np.linspace(0, len(rows) - 1, max_prompts).round().astype(np.int64)]
    names = store.index["sample_id"]
    found = (_cut(f"sample {names[int(row)][:12]}", "held-out", *store.read_tokens(int(row))) for row in rows)
    return [prompt for prompt in found if prompt is not None]


def spread_over_kinds(prompts: Sequence[Prompt], max_prompts: int | None) -> list[Prompt]:
    """Take the first prompts of every kind in turn, up to a number of prompts; None = all, in their order."""
    if max_prompts is None:
        return list(prompts)
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    dealt = chain.from_iterable(zip_longest(*by_kind.values()))
    return [prompt for prompt in dealt if prompt is not None][:max_prompts]


def _manifest_prompts(path: Path, tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    data = resolve_data(DataSection(manifest=path.name), path.parent)
    prompts = []
    for row in read_rows(data, tokenizer):
        kind = Path(row.source).stem
        for sample in row.samples:
            prompt = _cut_sample(f"{row.source}:{row.source_row}", kind, sample)
            if prompt is not None:
                prompts.append(prompt)
    return prompts


def _cut_sample(name: str, kind: str, sample: TokenSample) -> Prompt | None:
    return _cut(name, kind, sample.input_ids, sample.loss_mask)


def _cut(name: str, kind: str, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> Prompt | None:
    supervised = np.flatnonzero(loss_mask)
    if not len(supervised):
        return None
    # Conversations go up to the first assistant turn; plain text is supervised from its start and is cut in half.
    at = int(supervised[0])
    if at < MIN_PROMPT_TOKENS:
        at = len(input_ids) // 2
    if at < MIN_PROMPT_TOKENS:
        return None
    ids = tuple(int(token) for token in input_ids)
    return Prompt(name=name, kind=kind, token_ids=ids[:at], continuation=ids[at:])


def _read_lines(
    text: str, source: str, default_kind: str, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]
) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name = f"{source}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name}: not valid JSON ({error}); mend the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{name}: found {type(row).__name__}, expected an object with messages, prompt or text")
        ids, rest = _encode_row(row, name, tokenizer, kwargs)
        kind = str(row.get("kind") or row.get("category") or default_kind)
        yield Prompt(name=name, kind=kind, token_ids=tuple(ids), continuation=tuple(rest))


def _encode_row(
    row: dict[str, Any], name: str, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list):
            return _encode_messages(row[key], name, tokenizer, kwargs), []
    for key in ("prompt", "text"):
        if isinstance(row.get(key), str):
            ids: list[int] = tokenizer(row[key]).input_ids
            half = len(ids) // 2
            ids, rest = (ids, []) if key == "prompt" else (ids[:half], ids[half:])
            if not ids:
                raise DataError(f"{name}: {key} is too short for a prompt; remove the line")
            return ids, rest
    raise DataError(
        f"{name}: has {', '.join(sorted(row)) or 'no keys'}; expected messages, conversations, prompt or text"
    )


def _encode_messages(
    raw: list[Any], name: str, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]
) -> list[int]:
    try:
        messages = [normalise_message(message, number, set())[0] for number, message in enumerate(raw, start=1)]
    except RowError as error:
        raise DataError(f"{name}: {error.detail}; mend the line") from None
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # what follows the last question is the answer, not part of the prompt
    if not messages:
        raise DataError(f"{name}: no message before the assistant's; add the question")
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in messages)
        bare: list[int] = tokenizer(text).input_ids
        return bare
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
    assert isinstance(rendered, str)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False).input_ids
    return ids
