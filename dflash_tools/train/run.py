"""``train``: from a config and stores to a run folder."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from dflash_tools.config import TrainConfig
from dflash_tools.train.checkpoint import remove_unfinished
from dflash_tools.train.curves import Curves
from dflash_tools.train.dry_run import describe_run
from dflash_tools.train.folder import earlier_attempts, make_attempt, refuse_used_folder, write_run_files
from dflash_tools.train.lock import hold_run
from dflash_tools.train.loop import Outputs, TrainingLoop
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.resume import ResumePoint, find_resume_point
from dflash_tools.train.run_log import RunLog, read_evaluations, read_steps
from dflash_tools.train.saver import CheckpointSaver
from dflash_tools.train.setup import Setup, library_versions, make_learner, make_setup, make_state, make_work
from dflash_tools.train.step import Learner
from dflash_tools.train.stores import open_samples
from dflash_tools.train.summary import summarise_run
from dflash_tools.train.work import Work, probe_largest_batch
from dflash_tools.train.world import OneProcess, Threads, choose_device, join_world


def run_training(
    config: TrainConfig,
    stores: Sequence[Path],
    run_dir: Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    config_dir: Path = Path(),
) -> dict[str, Any]:
    """Train a drafter.

    Args:
        config: train.toml with its overrides.
        stores: One or more finished stores of the same target.
        run_dir: Holds plan, log, checkpoints; must be new or empty without ``resume``.
        resume: Go on from the newest whole checkpoint; from the start if there is none yet.
        dry_run: Only measure and estimate; nothing is written.
        config_dir: Where relative paths of the config are looked for first.

    Returns:
        Where the run lies, held-out figures before and after, and speed. Under torchrun the first rank gets them and
        the others an empty dict.

    Raises:
        ConfigError: If settings do not fit the store or this machine.
        StoreError: If a store cannot be used.
        ResumeError: If the folder is in use, or its checkpoint belongs to another run.
        UserError: If training cannot go on, e.g. for lack of memory or disk space.
        Interrupted: After a signal; everything is saved.
    """
    device = choose_device(config.hardware.device)
    samples = open_samples(stores)
    if dry_run:
        setup = make_setup(config, samples, device, OneProcess(), None, run_dir, config_dir)
        with Threads(setup.threads):
            return describe_run(make_work(setup), make_learner(setup))
    world = join_world(device)
    try:
        if world.rank == 0:
            refuse_used_folder(run_dir, resume=resume)
        with hold_run(run_dir) if world.rank == 0 else nullcontext():
            point = find_resume_point(run_dir) if resume else None
            if world.rank == 0:
                read_steps(run_dir, ("step",))  # a damaged log shows now, not after the training
            setup = make_setup(config, samples, device, world, point, run_dir, config_dir)
            with Threads(setup.threads):
                learner, work = make_learner(setup), make_work(setup)
                attempt = _begin(setup, run_dir, resume=resume)
                return _train(setup, learner, work, run_dir, attempt)
    finally:
        world.close()


def _begin(setup: Setup, run_dir: Path, *, resume: bool) -> int:
    """Write who the run is. Returns the number of this attempt."""
    attempts = earlier_attempts(run_dir) if resume else ()
    # Nobody writes before everybody has looked.
    setup.world.sum_in_place(torch.zeros(1, device=setup.device))
    if setup.world.rank == 0:
        attempt = make_attempt(
            len(attempts),
            from_step=setup.first_step,
            world_size=setup.world.size,
            threads=setup.threads,
            device=torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu",
            versions=library_versions(),
        )
        write_run_files(
            run_dir,
            setup.config,
            setup.samples,
            setup.plan,
            drafter=setup.drafter.to_dict(),
            settings=setup.settings,
            attempts=(*attempts, attempt),
        )
        remove_unfinished(run_dir)
    return len(attempts)


def _train(setup: Setup, learner: Learner, work: Work, run_dir: Path, attempt: int) -> dict[str, Any]:
    with ExitStack() as stack:
        first = setup.world.rank == 0
        progress = TrainProgress("train", setup.plan.num_steps, "steps", done=setup.first_step, silent=not first)
        for problem in setup.point.problems if setup.point else ():
            progress.say(f"passed over: {problem}")
        if setup.point and setup.point.state.versions != library_versions():
            progress.say(
                f"resumed with {_join(library_versions())}, saved with {_join(setup.point.state.versions)}: "
                "results agree, but perhaps not to the bit"
            )
        if setup.first_step < setup.plan.num_steps:
            probe_largest_batch(learner, work)
        loop = TrainingLoop(
            work,
            learner,
            make_state(setup, attempt),
            outputs=_open_outputs(stack, setup, run_dir, progress) if first else None,
            progress=stack.enter_context(progress),
            evaluated=_is_evaluated(run_dir, setup.point),
        )
        progress.begin()
        loop.run()
    return summarise_run(run_dir, loop.state, num_parameters=learner.num_parameters) if first else {}


def _open_outputs(stack: ExitStack, setup: Setup, run_dir: Path, progress: TrainProgress) -> Outputs:
    log = RunLog(run_dir)
    stack.callback(log.close)
    curves = stack.enter_context(Curves(run_dir, from_step=setup.first_step, num_steps=setup.plan.num_steps))
    if setup.first_step == 0:
        tables = setup.config.model_dump(mode="json")
        curves.write_settings({f"{t}.{key}": value for t, values in tables.items() for key, value in values.items()})
    saver = CheckpointSaver(run_dir, keep=setup.config.checkpoint.save_total_limit, report=progress.say)
    stack.callback(saver.join)
    return Outputs(run_dir=run_dir, log=log, curves=curves, saver=saver)


def _is_evaluated(run_dir: Path, point: ResumePoint | None) -> bool:
    """Whether the attempt that wrote the checkpoint had evaluated these very weights before it saved them."""
    if point is None:
        return False
    record = read_evaluations(run_dir).get(point.state.step)
    return record is not None and record.attempt == point.state.attempt


def _join(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
