"""The generate command: read prompts, have the missing ones answered, write the file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dflash_tools.config import GenerateConfig
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.errors import DataError, UserError
from dflash_tools.generate.accounting import Rows, make_figures, read_all
from dflash_tools.generate.client import NO_ANSWER
from dflash_tools.generate.dialogue import Dialogue
from dflash_tools.generate.job import Job, check_out, resolve_job
from dflash_tools.generate.journal import Journal, refuse_other_settings
from dflash_tools.generate.output import (
    MANIFEST_SUFFIX,
    journal_path,
    read_record,
    record_path,
    refuse_foreign_files,
    write_output,
)
from dflash_tools.generate.prompts import Prompt, PromptReader
from dflash_tools.generate.server import ServerWriter
from dflash_tools.progress import Progress


class Writer(Protocol):
    """Answers conversations: the target in this process, or a server."""

    def answer_all(self, dialogues: Iterator[Dialogue]) -> Iterator[list[Dialogue]]:
        """Yield conversations that are over, some at a time, in any order."""
        ...


def run_generation(config: GenerateConfig, config_dir: Path, out: Path) -> dict[str, Any]:
    """Have the target answer the prompts of some data; go on with what an earlier start left.

    Args:
        config: generate.toml, read.
        config_dir: Its folder; paths in it are relative to that.
        out: The file of answers, JSON lines. Beside it come a data manifest for ``extract`` (.toml) and a record of
            settings, figures and dropped rows (.record).

    Returns:
        Figures by the keys of docs/generate.md.

    Raises:
        ConfigError, DataError, ResumeError, UserError: Whatever the user can fix; all answers so far stay.
    """
    check_out(out)
    refuse_foreign_files(out)
    job = resolve_job(config, config_dir)
    reader = PromptReader(job.data, job.encoder.control_tokens)
    rows = read_all(reader.read())
    settings = {**job.settings, "prompts": fingerprint_of_json(rows.prompt_ids)}
    if out.exists() and not journal_path(out).exists():
        record = read_record(out)
        refuse_other_settings(record_path(out), record["settings"], settings)
        _say(f"{out}: is finished; nothing to do")
        return dict(record["figures"])
    with Journal(journal_path(out), job.settings) as journal:
        if rows.num_missing(journal):
            unanswered = _answer_missing(job, reader, rows, journal)
            rows.drop_unanswered(unanswered, journal)
            _refuse_gaps(unanswered, config.server.on_failure, out)
        figures = make_figures(rows, journal)
        if not figures["kept"]:
            raise DataError(_nothing_answered(rows))
        figures |= {"file": str(out), "manifest": str(out.with_suffix(MANIFEST_SUFFIX))}
        record = {"settings": settings, "figures": figures, "dropped": [row for _, row in sorted(rows.dropped.items())]}
        write_output(out, job, journal, (name for name in rows.prompt_ids if name in journal), record)
        journal.remove()
    if figures["kept"] * 2 < figures["read"]:
        kept, read = figures["kept"], figures["read"]
        _say(f"WARNING: only {kept} of {read} rows were answered; {record_path(out)} lists the rest")
    return figures


def _answer_missing(job: Job, reader: PromptReader, rows: Rows, journal: Journal) -> list[Dialogue]:
    """Answer what the journal does not hold; give the conversations without any answer."""
    writer = _make_writer(job)
    unanswered = []
    missing = (
        Dialogue(prompt, job.encoder)
        for prompt in reader.read()
        if isinstance(prompt, Prompt) and prompt.id not in journal
    )
    num_written = 0
    with Progress("generate", rows.num_missing(journal), "conversations") as progress:
        progress.begin()
        for done in writer.answer_all(missing):
            answered = []
            for dialogue in done:
                # A conversation that the server let down is not kept by half: the next start may do better.
                if dialogue.num_answers and not _let_down(dialogue):
                    answered.append(dialogue)
                else:
                    unanswered.append(dialogue)
            journal.append([dialogue.entry() for dialogue in answered])
            num_written += sum(dialogue.num_written for dialogue in answered)
            progress.advance(len(done), f"{num_written:,} tokens written")
    return unanswered


def _make_writer(job: Job) -> Writer:
    config = job.config
    if config.server.base_url:
        return ServerWriter(config.server, config.sampling, config.server.model or config.target.model)
    from dflash_tools.generate.local import load_writer  # torch loads only here

    return load_writer(config, job.tokenizer)


def _let_down(dialogue: Dialogue) -> bool:
    return dialogue.problem is not None and dialogue.problem.reason == NO_ANSWER


def _refuse_gaps(unanswered: list[Dialogue], on_failure: str, out: Path) -> None:
    gaps = [dialogue for dialogue in unanswered if _let_down(dialogue)]
    if not gaps or on_failure == "drop":
        return
    prompt, problem = gaps[0].prompt, gaps[0].problem
    assert problem is not None
    raise UserError(
        f"{out}: {len(gaps)} prompts have no answer, the first is {prompt.source}:{prompt.source_row}: "
        f"{problem.detail}; run the same command again to go on with them, or set server.on_failure = drop to finish "
        "without them"
    )


def _nothing_answered(rows: Rows) -> str:
    if not rows.num_read:
        return "data: the sources hold no rows at all; check data.sources or the data manifest"
    first = next(iter(rows.dropped.values()))
    return (
        f"data: none of {rows.num_read} rows was answered; the first is {first['source']}:{first['source_row']}: "
        f"{first['reason']}: {first['detail']}"
    )


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
