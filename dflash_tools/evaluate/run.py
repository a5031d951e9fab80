"""``evaluate``: load target and drafter, decode prompts both ways, and sum up what the drafter gained."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_tools.drafter.checkpoint_file import LayerIdConvention
from dflash_tools.errors import ConfigError
from dflash_tools.evaluate.decode import DecodeOptions, Pair, decode
from dflash_tools.evaluate.figures import Decoded
from dflash_tools.evaluate.gap import GapCounts
from dflash_tools.evaluate.prompts import Prompt
from dflash_tools.evaluate.question import ask, load_prompt_tokenizer
from dflash_tools.evaluate.session import batches_are_exact
from dflash_tools.evaluate.subject import Subject, open_subject, target_section
from dflash_tools.evaluate.summary import find_warnings, keep_result, sum_up
from dflash_tools.evaluate.tables import print_tables
from dflash_tools.progress import track
from dflash_tools.target.load import Target, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARM_UP_TOKENS = 4


def run_evaluation(
    path: Path,
    *,
    checkpoint: str = "best",
    target: str | None = None,
    dtype: str = "bfloat16",
    prompts: str | Path | None = None,
    max_prompts: int | None = None,
    max_new_tokens: int = 256,
    num_draft_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1,
    layer_ids_are: LayerIdConvention | None = None,
) -> dict[str, Any]:
    """Decode with drafter and target, and with the target alone.

    Args:
        path: A run folder, an export, or a released drafter.
        checkpoint: ``best``, ``latest`` or a number of steps; for a run.
        target: The target; default the one the drafter was trained for.
        dtype: Of target and drafter. In float32 greedy output must equal plain decoding; in bfloat16 differences are
            counted, since kernels of different widths round differently.
        prompts: A JSONL file, a data manifest, or ``builtin``; default the held-out samples of the run's stores, or
            the built-in prompts where no store can be read.
        max_prompts: At most this many, spread over kinds.
        max_new_tokens: Length of an answer.
        num_draft_tokens: Drafted tokens per cycle; default ``block_size - 1``.
        temperature: 0 = greedy; above, drafts are sampled and rejected so that the target's distribution holds.
        seed: Of sampling.
        batch_size: Prompts decoded together. Speeds are then those of the batch, with and without the drafter.
        layer_ids_are: How layer ids of a drafter folder count, where it cannot tell.

    Returns:
        Figures, warnings, tables by kind, context and prompt; also written to ``RUN/evaluate/``.

    Raises:
        UserError: If drafter, target and prompts cannot be brought together.
    """
    subject = open_subject(path, checkpoint, layer_ids_are)
    drafted = _num_draft_tokens(subject, num_draft_tokens)
    loaded = load_target(target_section(subject, target, dtype))
    _require_fitting(subject, loaded)
    if batch_size > 1 and not batches_are_exact(loaded):
        raise ConfigError(
            f"--batch-size {batch_size}: {loaded.identity.model} has sliding-window or recurrent layers, which decode "
            "one prompt at a time; leave --batch-size out"
        )
    tokenizer = load_prompt_tokenizer(subject, loaded)
    question = ask(subject, loaded, tokenizer, prompts, max_prompts, max_new_tokens + drafted)
    options = DecodeOptions(
        max_new_tokens=max_new_tokens,
        num_draft_tokens=drafted,
        temperature=temperature,
        stop_token_ids=stop_tokens(loaded, tokenizer),
        seed=seed,
    )
    pair = Pair.of(loaded, subject.drafter)
    decoded, gaps = decode_all(pair, question.prompts, options, batch_size)
    result = sum_up(subject, loaded, question, options, decoded, gaps, batch_size)
    result["warnings"] = find_warnings(subject, loaded, tokenizer, result)
    keep_result(subject, result, options)
    print_tables(result)
    return result


def decode_all(
    pair: Pair, prompts: Sequence[Prompt], options: DecodeOptions, batch_size: int = 1
) -> tuple[list[Decoded], GapCounts]:
    """Decode every prompt with and without the drafter, in turn, so that both meet the same machine.

    Args:
        pair: Target and drafter.
        prompts: At least one.
        options: How to decode.
        batch_size: Prompts decoded together; more than 1 only where ``session.batches_are_exact``.

    Returns:
        The answers in the order of the prompts, and the drafter's hits at other anchors and on other text (greedy
        decoding only).
    """
    greedy, gaps, target = options.temperature == 0.0, GapCounts(), pair.target
    # The first passes of a process pay for memory and kernels; they are not timed.
    short = replace(options, max_new_tokens=WARM_UP_TOKENS)
    decode(target, [prompts[0].token_ids], short)
    decode(target, [prompts[0].token_ids], short, pair)
    # Prompts of like length share a batch: padding costs time.
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row].token_ids) if batch_size > 1 else row)
    decoded: dict[int, Decoded] = {}
    for batch in track([rows[at : at + batch_size] for at in range(0, len(rows), batch_size)], "decode", "batches"):
        ids = [prompts[row].token_ids for row in batch]
        alone = decode(target, ids, options)
        fast = decode(target, ids, options, pair, keep_states=greedy)
        for row, with_drafter, without in zip(batch, fast, alone, strict=True):
            if greedy:
                gaps.add(pair, prompts[row], with_drafter, options.num_draft_tokens, seed=row)
            decoded[row] = Decoded(prompt=prompts[row], fast=replace(with_drafter, states=[]), plain=without)
    return [decoded[row] for row in range(len(prompts))], gaps


def stop_tokens(target: Target, tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Tokens that end an answer: those of the target's generation config and the tokenizer's own."""
    stated = getattr(target.model.generation_config, "eos_token_id", None)
    listed = [stated] if isinstance(stated, int) else list(stated or ())
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)


def _num_draft_tokens(subject: Subject, asked: int | None) -> int:
    most = subject.config.block_size - 1
    if asked is not None and not 1 <= asked <= most:
        raise ConfigError(
            f"--num-draft-tokens {asked}: a block of {subject.config.block_size} drafts 1 to {most} tokens; choose one"
        )
    return asked or most


def _require_fitting(subject: Subject, target: Target) -> None:
    config, identity = subject.config, target.identity
    pairs = {
        "hidden_size": (config.hidden_size, identity.hidden_size),
        "vocab_size": (config.vocab_size, identity.vocab_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ConfigError(
                f"{subject.path}: drafter of {name} {ours}, target {identity.model} has {theirs}; "
                "give the target it was trained for with --target"
            )
    last = max(config.target_layer_ids)
    if last > identity.num_hidden_layers - 2:
        raise ConfigError(
            f"{subject.path}: reads target layer {last}, but {identity.model} has layers 0 to "
            f"{identity.num_hidden_layers - 1} and the last is not read; give the right target, or --layer-ids-are vllm"
        )
