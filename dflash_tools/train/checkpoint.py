"""Checkpoints: written whole or not at all, read back bit for bit.

A checkpoint is a folder with two safetensors files and ``state.json``, which a person can read and which holds size
and SHA-256 of both. It is made under a temporary name, flushed to disk and renamed, so a folder named ``step-N`` is
whole unless the disk damaged it later. Nothing is pickled.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_tools.contracts.fingerprint import checksum_of_file
from dflash_tools.contracts.record import TrainState
from dflash_tools.contracts.run_folder import (
    CHECKPOINTS_DIR,
    DRAFTER_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    checkpoint_dir,
    list_checkpoints,
    read_state,
)
from dflash_tools.errors import UserError

_UNFINISHED = ".unfinished-"


class NonFiniteWeightsError(UserError):
    """Weights or moments hold NaN or infinity; such a checkpoint is never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy on the CPU of what a checkpoint holds."""

    state: TrainState  # files still empty
    drafter: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for part in (self.drafter, self.optimizer) for t in part.values())


def take_snapshot(state: TrainState, drafter: dict[str, Tensor], optimizer: dict[str, Tensor]) -> Snapshot:
    """Copy tensors to CPU memory that nothing else writes to; returns after the copy is complete."""
    snapshot = Snapshot(
        state=state,
        drafter={name: _copy(tensor) for name, tensor in drafter.items()},
        optimizer={name: _copy(tensor) for name, tensor in optimizer.items()},
    )
    for device in {tensor.device for tensor in (*drafter.values(), *optimizer.values()) if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return snapshot


def write_checkpoint(run_dir: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint: temporary folder, flush, rename, flush the parent.

    Returns:
        The folder of the finished checkpoint.

    Raises:
        NonFiniteWeightsError: If a tensor holds NaN or infinity; nothing is written.
        OSError: If the disk refuses, e.g. because it is full; earlier checkpoints are untouched, the rest is removed.
    """
    _refuse_non_finite(run_dir, snapshot)
    parent = run_dir / CHECKPOINTS_DIR
    parent.mkdir(parents=True, exist_ok=True)
    final = checkpoint_dir(run_dir, snapshot.state.step)
    unfinished = parent / f"{_UNFINISHED}{final.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _fill(unfinished, snapshot)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if final.exists():  # damaged, else the run would have gone on from it
        _remove(final)
    unfinished.rename(final)
    _flush(parent)
    return final


def load_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read the tensors of the drafter and of the optimizer; check them first with ``read_state``."""
    return load_file(checkpoint / DRAFTER_FILE), load_file(checkpoint / OPTIMIZER_FILE)


def verify_checkpoint(checkpoint: Path, snapshot: Snapshot) -> None:
    """Read a checkpoint back and compare every bit with what was to be saved.

    Raises:
        OSError: If the disk gave back something else.
    """
    try:
        drafter, optimizer = load_checkpoint(checkpoint)
    except SafetensorError as error:
        raise OSError(f"{checkpoint}: cannot be read back ({error})") from None
    for saved, found in ((snapshot.drafter, drafter), (snapshot.optimizer, optimizer)):
        if saved.keys() != found.keys():
            raise OSError(f"{checkpoint}: reads back other tensors than were saved")
        for name, tensor in saved.items():
            if tensor.dtype != found[name].dtype or not torch.equal(tensor, found[name]):
                raise OSError(f"{checkpoint}: {name} reads back differently than it was saved")


def update_state(checkpoint: Path, state: TrainState) -> None:
    """Replace ``state.json`` of a checkpoint whose tensors stay, after an evaluation that a signal had put off."""
    files = read_state(checkpoint, deep=False).files
    _write_state(checkpoint, state.model_copy(update={"files": files}))


def remove_old_checkpoints(run_dir: Path, *, newest: int, keep: int, best: int | None) -> list[Path]:
    """Delete all but the newest ``keep`` and the best checkpoint.

    Call it only after the newest one is committed: every committed checkpoint is finite, so a healthy one is always
    left. Folders beyond ``newest`` are damaged ones of an earlier attempt and do not count.

    Args:
        run_dir: The run folder.
        newest: Step of the checkpoint that was just committed.
        keep: How many of the newest stay, at least 1.
        best: Step of the lowest held-out loss, if any.

    Returns:
        The folders that were deleted.
    """
    known = {step: path for step, path in list_checkpoints(run_dir).items() if step <= newest}
    kept = set(sorted(known)[-max(keep, 1) :]) | {newest, best}
    old = [path for step, path in known.items() if step not in kept]
    for path in old:
        _remove(path)
    return old


def remove_unfinished(run_dir: Path) -> list[Path]:
    """Delete what a killed process left of a checkpoint it was writing or deleting."""
    folder = run_dir / CHECKPOINTS_DIR
    left = [path for path in folder.glob(f"{_UNFINISHED}*") if path.is_dir()] if folder.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return left


def _copy(tensor: Tensor) -> Tensor:
    # Page-locked memory takes copies from a GPU several times faster, and torch keeps it for the next snapshot.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _refuse_non_finite(run_dir: Path, snapshot: Snapshot) -> None:
    for name, tensor in [*snapshot.drafter.items(), *snapshot.optimizer.items()]:
        if not bool(torch.isfinite(tensor).all()):
            healthy = max(list_checkpoints(run_dir), default=None)
            where = f"the last healthy checkpoint is step {healthy}" if healthy is not None else "there is none before"
            raise NonFiniteWeightsError(
                f"{run_dir}: after step {snapshot.state.step} the tensor {name} holds NaN or infinity, so no "
                f"checkpoint was written; {where}. Start a new run with a lower optimizer.learning_rate."
            )


def _fill(folder: Path, snapshot: Snapshot) -> None:
    folder.mkdir()
    files: dict[str, tuple[int, str]] = {}
    for name, tensors in ((DRAFTER_FILE, snapshot.drafter), (OPTIMIZER_FILE, snapshot.optimizer)):
        path = folder / name
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # the library's own class for a full disk, too
            raise OSError(str(error)) from None
        _flush(path)
        files[name] = (path.stat().st_size, checksum_of_file(path))
    _write_state(folder, snapshot.state.model_copy(update={"files": files}))


def _write_state(folder: Path, state: TrainState) -> None:
    unfinished = folder / f"{STATE_FILE}.unfinished"
    unfinished.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
    _flush(unfinished)
    unfinished.rename(folder / STATE_FILE)
    _flush(folder)


def _remove(checkpoint: Path) -> None:
    # Renamed first: a kill in the middle must not leave half a checkpoint under a valid name.
    doomed = checkpoint.with_name(f"{_UNFINISHED}old-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
