"""The run folder: where its files lie, whose it is, and which checkpoint a word or a number means.

Here, below the rooms, because ``train`` writes it and ``evaluate``, ``export`` and ``report`` read it.
"""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.manifest import DataIdentity, TargetIdentity, TokenizerIdentity
from dflash_tools.contracts.record import TrainState
from dflash_tools.errors import ResumeError

RUN_SCHEMA_VERSION = 1

CARD_FILE = "run.json"
CONFIG_FILE = "config.toml"
PLAN_FILE = "plan.parquet"
LOG_FILE = "log.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
TENSORBOARD_DIR = "tensorboard"
CHECKPOINTS_DIR = "checkpoints"

STATE_FILE = "state.json"
DRAFTER_FILE = "drafter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"

_CHECKPOINT_NAME = re.compile(r"step-(\d+)")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreReference(_Frozen):
    """A store that a run was trained on."""

    path: str  # where it lay at the newest start
    fingerprint: str


class Attempt(_Frozen):
    """One process start in a run folder."""

    attempt: int
    started_at: float  # seconds since 1970, UTC
    from_step: int
    world_size: int
    threads: int
    device: str
    versions: dict[str, str]


class RunCard(_Frozen):
    """``run.json``: the identity card of a run."""

    schema_version: int = RUN_SCHEMA_VERSION
    stores: tuple[StoreReference, ...]
    plan_fingerprint: str
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    data: tuple[DataIdentity, ...]  # one entry per store
    hidden_states_dtype: str
    drafter: dict[str, Any]  # DrafterConfig.to_dict()
    settings: dict[str, Any]  # what changes the numbers: loss, optimizer, numerics
    attempts: tuple[Attempt, ...]


def read_card(run_dir: Path) -> RunCard:
    """Read ``run.json``.

    Raises:
        ResumeError: If the folder is no run, or of another schema.
    """
    path = run_dir / CARD_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResumeError(f"{run_dir}: no {CARD_FILE} here; give the folder that train wrote with --run") from None
    except json.JSONDecodeError as error:
        raise ResumeError(f"{path}: not valid JSON ({error}); restore the file or train anew") from None
    found = content.get("schema_version")
    if found != RUN_SCHEMA_VERSION:
        raise ResumeError(f"{path}: schema version {found}, this program reads {RUN_SCHEMA_VERSION}; use its version")
    try:
        return RunCard.model_validate(content)
    except ValidationError as error:
        fields = ", ".join(".".join(str(part) for part in problem["loc"]) for problem in error.errors())
        raise ResumeError(f"{path}: unusable fields {fields}; restore the file or train anew") from None


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Name the folder of the checkpoint after ``step`` updates."""
    return run_dir / CHECKPOINTS_DIR / f"step-{step:07d}"


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Find checkpoint folders by step, ascending; whether they are whole is not looked at."""
    folder = run_dir / CHECKPOINTS_DIR
    if not folder.is_dir():
        return {}
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def read_state(checkpoint: Path, *, deep: bool = True) -> TrainState:
    """Read and check ``state.json`` of a checkpoint and the files it names.

    Args:
        checkpoint: Folder of one checkpoint.
        deep: Also compare checksums; otherwise sizes only.

    Raises:
        ResumeError: If the checkpoint is not whole, or of another schema.
    """
    path = checkpoint / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        state = TrainState.model_validate(content)
    except FileNotFoundError:
        raise ResumeError(f"{checkpoint}: not whole, {STATE_FILE} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ResumeError(f"{path}: unreadable or of another schema: {str(error).splitlines()[0]}") from None
    expected = TrainState.model_fields["schema_version"].default
    if state.schema_version != expected:
        raise ResumeError(f"{path}: schema version {state.schema_version}, this program reads {expected}")
    for name, (size, checksum) in state.files.items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ResumeError(f"{file}: {'missing' if found is None else f'{found} bytes'}, expected {size} bytes")
        if deep and checksum_of_file(file) != checksum:
            raise ResumeError(f"{file}: the bytes are not those that were saved (SHA-256 differs)")
    return state


def newest_checkpoint(run_dir: Path) -> tuple[Path, TrainState, list[str]] | None:
    """Find the newest whole checkpoint, by number.

    Returns:
        Its folder and state, and one sentence for each newer folder that is not whole; None if the run has no
        checkpoint folder at all.

    Raises:
        ResumeError: If there are checkpoints and none of them is whole.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(run_dir).values()):
        try:
            return path, read_state(path), problems
        except ResumeError as error:
            problems.append(str(error))
    if problems:
        raise ResumeError(f"{run_dir}: no whole checkpoint: " + "; ".join(problems))
    return None


def find_checkpoint(run_dir: Path, which: str) -> tuple[Path, TrainState]:
    """Find the checkpoint that ``--checkpoint`` names.

    Args:
        run_dir: A run folder.
        which: ``latest``, ``best`` (lowest held-out loss), or a number of steps.

    Raises:
        ResumeError: If there is none such, or it is not whole; another one is never taken instead.
    """
    newest = newest_checkpoint(run_dir)
    if newest is None:
        raise ResumeError(f"{run_dir}: no checkpoint yet; train it with train --run {run_dir}")
    path, state, problems = newest
    if which == "latest":
        if problems:
            raise ResumeError(
                f"{run_dir}: the latest checkpoint is not whole ({problems[0]}); "
                f"give --checkpoint {state.step} for the newest whole one"
            )
        return path, state
    if which == "best":
        if state.best_step is None:
            raise ResumeError(
                f"{run_dir}: no held-out evaluation chose a best checkpoint (a store without held-out samples never "
                "gets one); use --checkpoint latest"
            )
        step = state.best_step
    elif which.isdecimal():
        step = int(which)
    else:
        raise ResumeError(f"--checkpoint {which}: expected best, latest or a number of steps")
    found = list_checkpoints(run_dir)
    if step not in found:
        steps = ", ".join(str(known) for known in found)
        raise ResumeError(f"{run_dir}: no checkpoint of step {step}; there are {steps}")
    return found[step], read_state(found[step])
