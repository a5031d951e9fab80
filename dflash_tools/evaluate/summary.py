"""The result of an evaluation: figures, warnings, and the file in the run folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_tools import __version__
from dflash_tools.data import tokenizer_identity
from dflash_tools.evaluate.decode import DecodeOptions
from dflash_tools.evaluate.figures import (
    Decoded,
    acceptance_figures,
    bootstrap_interval,
    by_context,
    by_kind,
    by_prompt,
    divergence,
    speed_figures,
)
from dflash_tools.evaluate.gap import GapCounts, gap_steps
from dflash_tools.evaluate.question import Question
from dflash_tools.evaluate.subject import Subject, differing_copies
from dflash_tools.printing import plain
from dflash_tools.target.load import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGE_GAP = 0.75  # a true acceptance length below this share of the estimate calls for a look
CHECKLIST = (
    "look at chat template and its arguments, layer ids, rope theta, mask token, quantisation of the target (run "
    "dflash-tools check with --target), and at the steps of the gap: text unlike the training data is the usual cause"
)


def sum_up(
    subject: Subject,
    target: Target,
    question: Question,
    options: DecodeOptions,
    decoded: list[Decoded],
    gaps: GapCounts,
    batch_size: int,
) -> dict[str, Any]:
    """Gather every figure of an evaluation.

    Args:
        subject: The drafter.
        target: Its target.
        question: The prompts.
        options: How they were decoded.
        decoded: The answers.
        gaps: The drafter's hits at other anchors and on other text.
        batch_size: Prompts decoded together.

    Returns:
        Single figures first, tables last.
    """
    greedy = options.temperature == 0.0
    cycles = [cycle for one in decoded for cycle in one.fast.cycles]
    figures = acceptance_figures(cycles, options.num_draft_tokens)
    different = [one for one in decoded if divergence(one) is not None] if greedy else []
    recomputes = any(one.fast.recomputed for one in decoded)
    length = figures["acceptance_length"]
    gap = gaps.analysis(length, trained_estimate(subject, options.num_draft_tokens)) if greedy else None
    return {
        "acceptance_length": length,
        "acceptance_interval": bootstrap_interval(decoded),
        **figures,
        **speed_figures(decoded),
        "identical": not different if greedy else None,
        "num_different": len(different) if greedy else None,
        "first_divergence": {"prompt": different[0].prompt.name, **(divergence(different[0]) or {})}
        if different
        else None,
        "prompts": question.source,
        "num_prompts": len(decoded),
        "num_new_tokens": sum(len(one.fast.token_ids) for one in decoded),
        "skipped": question.skipped,
        "drafter": str(subject.path),
        "step": subject.step,
        "target": target.identity.model,
        "dtype": target.identity.dtype,
        "device": str(target.device),
        "temperature": options.temperature,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "batch_size": batch_size,
        "target_cache": "recomputed: recurrent states cannot be cut back" if recomputes else "cropped",
        "gap": gap,
        "gap_steps": gap_steps(gap) if gap else [],
        "by_kind": by_kind(decoded, options.num_draft_tokens),
        "by_context": by_context(decoded, options.num_draft_tokens),
        "by_prompt": by_prompt(decoded, options.num_draft_tokens),
        "version": __version__,
    }


def trained_estimate(subject: Subject, num_draft_tokens: int) -> float | None:
    """What training estimated on held-out samples; None for shorter blocks, which training does not measure."""
    return subject.trained_acceptance_length if num_draft_tokens == subject.config.block_size - 1 else None


def find_warnings(
    subject: Subject, target: Target, tokenizer: "PreTrainedTokenizerBase", result: dict[str, Any]
) -> list[str]:
    """Name what differs from training, and results that call for a look. One sentence each."""
    trained, identity, known = subject.target, target.identity, tokenizer_identity(tokenizer)
    pairs: dict[str, tuple[object, object]] = {
        "tokenizer": (subject.tokenizer_fingerprint, known.fingerprint),
        "chat template": (subject.chat_template_fingerprint, known.chat_template_fingerprint),
    }
    if trained is not None:
        pairs |= {
            "target": (trained.model, identity.model),
            "target config": (trained.config_fingerprint, identity.config_fingerprint),
            "quantisation of the target": (trained.quantization, identity.quantization),
        }
    found = [
        f"{name} differs from training: {theirs}, trained with {ours}"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs and not (ours is None and trained is None)
    ]
    found += [
        f"{name} in {subject.path} is not the target's; the target's own is used here, as SGLang does"
        for name in differing_copies(subject, target)
    ]
    if result["num_different"] and identity.dtype == "float32":
        found.append(
            f"{result['num_different']} answers differ from plain decoding in float32; see divergence in by_prompt: "
            "gaps near 0 are ties, larger ones a fault"
        )
    estimate, length = trained_estimate(subject, result["num_draft_tokens"]), result["acceptance_length"]
    if estimate is not None and length < LARGE_GAP * estimate:
        found.append(f"true acceptance length {length:.2f}, estimated in training {estimate:.2f}: {CHECKLIST}")
    return found


def keep_result(subject: Subject, result: dict[str, Any], options: DecodeOptions) -> None:
    """Write the result to ``RUN/evaluate/``; the same question overwrites its older answer."""
    if subject.results_dir is None:
        return
    source = result["prompts"].split(" ")[0].rstrip(",")
    name = (
        f"step-{subject.step or 0:07d}-{Path(source).stem}-{result['dtype']}-t{options.temperature:g}"
        f"-k{options.num_draft_tokens}-b{result['batch_size']}.json"
    )
    subject.results_dir.mkdir(exist_ok=True)
    result["results"] = str(subject.results_dir / name)
    (subject.results_dir / name).write_text(json.dumps(plain(result), indent=2) + "\n", encoding="utf-8")
