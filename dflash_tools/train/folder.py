"""The files of a run folder besides checkpoints and logs: who the run is, its settings and its plan."""

import os
import time
from pathlib import Path
from typing import Any

import tomli_w

from dflash_tools.config import TrainConfig
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.run_folder import (
    CARD_FILE,
    CONFIG_FILE,
    PLAN_FILE,
    RUN_SCHEMA_VERSION,
    Attempt,
    RunCard,
    StoreReference,
    read_card,
)
from dflash_tools.errors import ResumeError
from dflash_tools.plan.table import load_plan, save_plan
from dflash_tools.train.lock import LOCK_FILE
from dflash_tools.train.stores import Samples


def refuse_used_folder(run_dir: Path, *, resume: bool) -> None:
    """Stop before a run mixes with something else.

    Raises:
        ResumeError: If it is no folder; if a new run would go into one that holds anything; or if a run to go on with
            would be among strange files.
    """
    if not run_dir.exists():
        return
    if not run_dir.is_dir():
        raise ResumeError(f"{run_dir} is a file; name a folder with --run")
    names = {path.name for path in run_dir.iterdir()} - {LOCK_FILE}
    if names and not resume:
        raise ResumeError(
            f"{run_dir} is not empty; add --resume to go on with the run in it, or name a new folder with --run"
        )
    # A start that was killed early leaves config and plan, whole or not, but no card.
    strange = sorted(name for name in names if not name.strip(".").startswith((CONFIG_FILE, PLAN_FILE, CARD_FILE)))
    if strange and CARD_FILE not in names:
        raise ResumeError(f"{run_dir}: no {CARD_FILE} here, but {strange[0]}, so this is no run; name another folder")


def earlier_attempts(run_dir: Path) -> tuple[Attempt, ...]:
    """Process starts that the folder knows of."""
    return read_card(run_dir).attempts if (run_dir / CARD_FILE).is_file() else ()


def write_run_files(
    run_dir: Path,
    config: TrainConfig,
    samples: Samples,
    plan: BatchPlan,
    *,
    drafter: dict[str, Any],
    settings: dict[str, Any],
    attempts: tuple[Attempt, ...],
) -> None:
    """Write config, plan and card, each whole or not at all.

    A plan that was extended keeps its predecessor beside it: the newest checkpoint still names that one.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    text = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    _replace(run_dir / CONFIG_FILE, text.encode())
    _write_plan(run_dir, plan)
    manifests = [store.manifest for store in samples.stores]
    card = RunCard(
        schema_version=RUN_SCHEMA_VERSION,
        stores=tuple(
            StoreReference(path=str(store.path.absolute()), fingerprint=store.manifest.fingerprint())
            for store in samples.stores
        ),
        plan_fingerprint=plan.fingerprint(),
        target=manifests[0].target,
        tokenizer=manifests[0].tokenizer,
        data=tuple(manifest.data for manifest in manifests),
        hidden_states_dtype=manifests[0].hidden_states_dtype,
        drafter=drafter,
        settings=settings,
        attempts=attempts,
    )
    _replace(run_dir / CARD_FILE, (card.model_dump_json(indent=2) + "\n").encode())


def make_attempt(
    number: int, *, from_step: int, world_size: int, threads: int, device: str, versions: dict[str, str]
) -> Attempt:
    """Describe this process start."""
    return Attempt(
        attempt=number,
        started_at=time.time(),
        from_step=from_step,
        world_size=world_size,
        threads=threads,
        device=device,
        versions=versions,
    )


def _write_plan(run_dir: Path, plan: BatchPlan) -> None:
    path = run_dir / PLAN_FILE
    if path.is_file():
        before = load_plan(path).fingerprint()
        if before == plan.fingerprint():
            return
        path.rename(run_dir / f"plan-{before[:12]}.parquet")
    unfinished = path.with_suffix(".unfinished")
    save_plan(plan, unfinished)
    unfinished.rename(path)


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
