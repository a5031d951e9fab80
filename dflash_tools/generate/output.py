"""The finished file of answers, and beside it a data manifest for extract and a record of how it was made."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w

from dflash_tools.errors import ConfigError
from dflash_tools.generate.job import Job
from dflash_tools.generate.journal import Journal, to_line

MANIFEST_SUFFIX = ".toml"
TEMPLATE_SUFFIX = ".jinja"
# Not .json: a folder that is read as data would take it for rows.
RECORD_SUFFIX = ".record"


def refuse_foreign_files(out: Path) -> None:
    """Stop if a file that would be replaced was not written by an earlier start.

    Raises:
        ConfigError: It names the file.
    """
    if record_path(out).exists() or journal_path(out).exists():
        return
    for path in (out, out.with_suffix(MANIFEST_SUFFIX), out.with_suffix(TEMPLATE_SUFFIX)):
        if path.exists():
            raise ConfigError(f"{path}: is there and was not written by generate; choose another --out")


def journal_path(out: Path) -> Path:
    """Where answers stand until all are there."""
    return out.with_name(out.name + ".partial")


def record_path(out: Path) -> Path:
    """Where settings and figures stand."""
    return out.with_suffix(RECORD_SUFFIX)


def read_record(out: Path) -> dict[str, Any]:
    """Read how a finished file was made."""
    record: dict[str, Any] = json.loads(record_path(out).read_text(encoding="utf-8"))
    return record


def write_output(out: Path, job: Job, journal: Journal, prompt_ids: Iterable[str], record: dict[str, Any]) -> None:
    """Write the answers in the order of the prompts; the file itself appears last and whole.

    Args:
        out: The file.
        job: What was done.
        journal: The answers.
        prompt_ids: Prompts with answers, in the order of the input.
        record: Settings and figures.
    """
    _write(record_path(out), [json.dumps(record, ensure_ascii=False, indent=1).encode() + b"\n"])
    template = job.data.chat_template
    if template is not None:
        _write(out.with_suffix(TEMPLATE_SUFFIX), [template.encode()])
    _write(out.with_suffix(MANIFEST_SUFFIX), [tomli_w.dumps(make_manifest(out, job)).encode()])
    _write(out, (to_line(row) for prompt_id in prompt_ids for row in journal.read(prompt_id)["rows"]))


def make_manifest(out: Path, job: Job) -> dict[str, Any]:
    """Make the data manifest with which extract reads the answers as they were made."""
    sampling, data = job.config.sampling, job.data
    prompts = f"{data.name} ({data.origin})" if data.origin else data.name
    manifest: dict[str, Any] = {
        "name": out.stem,
        "license": data.license,
        "origin": (
            f"prompts: {prompts}; answers by {job.config.target.model}, temperature {sampling.temperature}, "
            f"top_p {sampling.top_p}, top_k {sampling.top_k}, seed {sampling.seed}"
        ),
        "max_tokens": job.encoder.max_tokens,
        "loss_on": "assistant",
        "sources": [{"path": out.name}],
    }
    if data.chat_template is not None:
        manifest["chat_template"] = out.with_suffix(TEMPLATE_SUFFIX).name
    # TOML has no null; to a template an absent variable is the same.
    kwargs = {name: value for name, value in data.chat_template_kwargs.items() if value is not None}
    return manifest | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _write(path: Path, parts: Iterable[bytes]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
