"""Which prompts are decoded, and with which tokenizer and chat template."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_tools.data import load_tokenizer
from dflash_tools.errors import ConfigError, StoreError
from dflash_tools.evaluate.prompts import Prompt, builtin_prompts, file_prompts, held_out_prompts, spread_over_kinds
from dflash_tools.evaluate.subject import Subject
from dflash_tools.store import open_store
from dflash_tools.target.load import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = "builtin"
HELD_OUT = "held-out"
NUM_HELD_OUT = 16  # prompts by default: enough for an interval, few enough for a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the drafter.

    Attributes:
        prompts: The prompts.
        source: Where they come from, in words.
        skipped: Prompts that do not fit into the target's context.
    """

    prompts: list[Prompt]
    source: str
    skipped: list[str]


def load_prompt_tokenizer(subject: Subject, target: Target) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a store the drafter was trained on, with its chat template; else the target's own."""
    # A store keeps the tokenizer with the template that made the samples.
    for store in subject.stores:
        if (store / "target" / "tokenizer.json").is_file():
            return load_tokenizer(str(store / "target"))
    return load_tokenizer(
        target.tokenizer_source, revision=target.identity.revision, gguf_file=target.identity.gguf_file
    )


def ask(
    subject: Subject,
    target: Target,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: str | Path | None,
    max_prompts: int | None,
    room: int,
) -> Question:
    """Choose the prompts.

    Args:
        subject: The drafter.
        target: Its target.
        tokenizer: The tokenizer.
        prompts: A file, ``builtin``, or None for held-out samples of the run's stores, else the built-in ones.
        max_prompts: At most this many.
        room: Tokens that must fit behind a prompt.

    Raises:
        ConfigError: If no prompt fits into the target's context.
        DataError: If a file cannot be read.
    """
    kwargs = subject.chat_template_kwargs
    if prompts is None:
        found, source = _held_out(subject, max_prompts or NUM_HELD_OUT)
        if not found:
            found, source = builtin_prompts(tokenizer, kwargs), f"{BUILTIN}, since {source}"
    elif str(prompts) == BUILTIN:
        found, source = builtin_prompts(tokenizer, kwargs), BUILTIN
    else:
        found, source = file_prompts(Path(prompts), tokenizer, kwargs), str(prompts)
    # Longest sequence of the target: a prompt, the answer, and the block that passes its end.
    limit = getattr(target.parts.text_config, "max_position_embeddings", None)
    fitting = [prompt for prompt in found if limit is None or len(prompt.token_ids) + room <= limit]
    skipped = [prompt.name for prompt in found if prompt not in fitting]
    if not fitting:
        raise ConfigError(f"--prompts {source}: no prompt fits with {room} new tokens into {limit} positions")
    return Question(prompts=spread_over_kinds(fitting, max_prompts), source=source, skipped=skipped)


def _held_out(subject: Subject, max_prompts: int) -> tuple[list[Prompt], str]:
    if not subject.stores:
        return [], "no store is known"
    problems = []
    for path in subject.stores:
        try:
            store = open_store(path)
        except StoreError as error:
            problems.append(str(error).split(";")[0])
            continue
        found = held_out_prompts(store, max_prompts)
        if found:
            return found, f"{HELD_OUT} samples of {path}"
        problems.append(f"{path} holds nothing out")
    return [], "; ".join(problems)
