"""The run folder: its card (``run.json``) and its checkpoints, as train writes and others read them."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_tools.contracts.manifest import DataIdentity, TargetIdentity, TokenizerIdentity
from dflash_tools.contracts.record import TrainState
from dflash_tools.errors import ResumeError

RUN_SCHEMA_VERSION = 1
RUN_CARD = "run.json"
STATE_FILE = "state.json"
DRAFTER_FILE = "drafter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"

_CHECKPOINT_NAME = re.compile(r"step-(\d{7,})")


class RunCard(BaseModel):
    """What a run was trained from and for: ``run.json``, written once before step 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = RUN_SCHEMA_VERSION
    stores: tuple[str, ...]  # as given on the command line
    store_fingerprints: tuple[str, ...]
    target: TargetIdentity
    tokenizer: TokenizerIdentity
    data: tuple[DataIdentity, ...]  # one per store
    hidden_states_dtype: str
    drafter: dict[str, Any]  # DrafterConfig.to_dict()
    plan_fingerprint: str
    versions: dict[str, str]


def read_run_card(run_dir: Path) -> RunCard:
    """Read ``run.json``.

    Raises:
        ResumeError: If the folder is no run, or its card is damaged or of another schema.
    """
    path = run_dir / RUN_CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResumeError(
            f"{run_dir}: no {RUN_CARD}, so this is no run folder; give the folder that train wrote"
        ) from None
    except ValueError as error:
        raise ResumeError(f"{path}: damaged ({error}); restore it from a copy of the run") from None
    found = card.get("schema_version") if isinstance(card, dict) else None
    if found != RUN_SCHEMA_VERSION:
        raise ResumeError(
            f"{path}: schema version {found}, expected {RUN_SCHEMA_VERSION}; use the release that wrote it"
        )
    try:
        return RunCard.model_validate(card)
    except ValidationError as error:
        raise ResumeError(f"{path}: {error.error_count()} fields do not fit: {error.errors()[0]['loc']}") from None


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` updates."""
    return run_dir / "checkpoints" / f"step-{step:07d}"


def read_state(checkpoint: Path) -> TrainState | None:
    """Read ``state.json`` of a checkpoint; None if the checkpoint is not whole (missing, torn, or of other sizes)."""
    try:
        state = TrainState.model_validate_json((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        sizes = {name: (checkpoint / name).stat().st_size for name in state.files}
    except (OSError, ValueError):
        return None
    return state if all(sizes[name] == size for name, (size, _) in state.files.items()) else None


def whole_checkpoints(run_dir: Path) -> dict[int, TrainState]:
    """Find the checkpoints that were written to the end: steps done -> state, ascending by number."""
    folder = run_dir / "checkpoints"
    found: dict[int, TrainState] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        state = read_state(path) if match else None
        if match and state is not None and state.step == int(match[1]):
            found[state.step] = state
    return dict(sorted(found.items()))


def choose_checkpoint(run_dir: Path, which: str) -> tuple[Path, TrainState]:
    """Find ``best``, ``latest``, or the checkpoint after a number of steps.

    Raises:
        ResumeError: If there is no such checkpoint; the message names those that are there.
    """
    whole = whole_checkpoints(run_dir)
    if not whole:
        raise ResumeError(f"{run_dir}: no whole checkpoint; train it first")
    newest = max(whole)
    if which == "latest":
        step: int | None = newest
    elif which == "best":
        step = whole[newest].best_step
        step = newest if step is None else step
    else:
        step = int(which) if which.isdigit() else None
    if step not in whole:
        there = ", ".join(str(one) for one in whole)
        raise ResumeError(f"{run_dir}: no checkpoint {which!r}; there are {there}; give one of them, best or latest")
    return checkpoint_dir(run_dir, step), whole[step]
