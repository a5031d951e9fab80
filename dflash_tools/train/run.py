"""``train``: from a config and stores to a run folder."""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_tools import __version__
from dflash_tools.config import TrainConfig
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.record import TrainState
from dflash_tools.drafter.config import DrafterConfig, resolve_decay_gamma, resolve_drafter
from dflash_tools.drafter.frozen import FrozenTarget
from dflash_tools.drafter.model import AttentionPath, DFlashDrafter
from dflash_tools.errors import StoreError
from dflash_tools.train.batch import BatchReader
from dflash_tools.train.checkpoint import load_checkpoint, remove_unfinished
from dflash_tools.train.curves import Curves
from dflash_tools.train.dry_run import describe_run
from dflash_tools.train.folder import earlier_attempts, make_attempt, refuse_used_folder, write_run_files
from dflash_tools.train.loop import Outputs, TrainingLoop
from dflash_tools.train.optimizer import build_optimizer, load_optimizer_tensors
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.records import Composition
from dflash_tools.train.requests import batch_costs, evaluation_requests
from dflash_tools.train.resume import ResumePoint, check_extension, check_same_run, find_resume_point, settings_of
from dflash_tools.train.run_log import RunLog, read_evaluations
from dflash_tools.train.saver import CheckpointSaver
from dflash_tools.train.step import Learner
from dflash_tools.train.stores import Samples, anchors_of_rows, open_samples, plan_training
from dflash_tools.train.summary import summarise_run
from dflash_tools.train.work import Work, probe_largest_batch
from dflash_tools.train.world import World, choose_device, choose_threads, join_world

_LIBRARIES = ("numpy", "safetensors", "torch")


def run_training(
    config: TrainConfig, stores: Sequence[Path], run_dir: Path, *, resume: bool = False, dry_run: bool = False
) -> dict[str, Any]:
    """Train a drafter.

    Args:
        config: train.toml with its overrides.
        stores: One or more finished stores of the same target.
        run_dir: Holds plan, log, checkpoints; must be new or empty without ``resume``.
        resume: Go on from the newest whole checkpoint; from the start if there is none yet.
        dry_run: Only measure and estimate; nothing is written.

    Returns:
        Where the run lies, held-out figures before and after, and speed. Under torchrun the first rank gets them and
        the others an empty dict.

    Raises:
        ConfigError: If settings do not fit the store or this machine.
        StoreError: If a store cannot be used.
        ResumeError: If the folder is in use, or its checkpoint belongs to another run.
        Interrupted: After a signal; everything is saved.
    """
    device = choose_device(config.hardware.device)
    samples = open_samples(stores)
    drafter = _resolve_drafter(config, samples)
    if dry_run:
        with _Threads(choose_threads(config.hardware.threads)):
            return _describe(config, samples, drafter, device)
    world = join_world(device)
    try:
        return _train(_prepare(config, samples, drafter, device, world, run_dir, resume=resume), run_dir)
    finally:
        world.close()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Setup:
    config: TrainConfig
    samples: Samples
    drafter: DrafterConfig
    device: torch.device
    attention: AttentionPath
    threads: int
    world: World
    plan: BatchPlan
    settings: dict[str, Any]
    point: ResumePoint | None
    attempt: int


def _prepare(
    config: TrainConfig,
    samples: Samples,
    drafter: DrafterConfig,
    device: torch.device,
    world: World,
    run_dir: Path,
    *,
    resume: bool,
) -> _Setup:
    """Decide everything before step 0, and write who the run is."""
    if not resume and world.rank == 0:
        refuse_used_folder(run_dir)
    point = find_resume_point(run_dir) if resume else None
    attention = _choose_attention(config, device)
    gamma = resolve_decay_gamma(config.loss.loss_decay_gamma, drafter.block_size)
    settings = settings_of(config, gamma=gamma, attention=attention, device_type=device.type)
    if point is None:
        plan = plan_training(samples, config)
        threads = choose_threads(config.hardware.threads)
    else:
        check_same_run(
            run_dir,
            point,
            store_fingerprints=samples.fingerprints,
            drafter=drafter.to_dict(),
            settings=settings,
            config=config,
        )
        plan = _resume_plan(run_dir, point, samples, config)
        threads = point.state.threads
    attempts = earlier_attempts(run_dir) if resume else ()
    setup = _Setup(
        config=config,
        samples=samples,
        drafter=drafter,
        device=device,
        attention=attention,
        threads=threads,
        world=world,
        plan=plan,
        settings=settings,
        point=point,
        attempt=len(attempts),
    )
    # Nobody writes before everybody has looked.
    world.sum_in_place(torch.zeros(1, device=device))
    if world.rank == 0:
        attempt = make_attempt(
            len(attempts),
            from_step=point.state.step if point else 0,
            world_size=world.size,
            threads=threads,
            device=_name_device(device),
            versions=_versions(),
        )
        write_run_files(
            run_dir,
            config,
            samples,
            plan,
            drafter=drafter.to_dict(),
            settings=settings,
            attempts=(*attempts, attempt),
        )
        remove_unfinished(run_dir)
    return setup


def _train(setup: _Setup, run_dir: Path) -> dict[str, Any]:
    world, config = setup.world, setup.config
    with ExitStack() as stack:
        stack.enter_context(_Threads(setup.threads))
        learner = _make_learner(setup)
        state = _first_state(setup)
        work = _make_work(setup)
        progress = TrainProgress(setup.plan.num_steps, done=state.step, silent=world.rank > 0)
        outputs = None
        if world.rank == 0:
            outputs = _open_outputs(stack, run_dir, config, setup.plan, state.step, progress)
            for problem in setup.point.problems if setup.point else ():
                progress.say(f"passed over: {problem}")
        loop = TrainingLoop(
            work,
            learner,
            state,
            outputs=outputs,
            progress=progress,
            evaluated=_is_evaluated(run_dir, setup.point),
        )
        if state.step < setup.plan.num_steps:
            probe_largest_batch(learner, work)
        stack.enter_context(progress)
        loop.run()
    if world.rank > 0:
        return {}
    return summarise_run(run_dir, loop.state, num_parameters=learner.num_parameters)


def _make_learner(setup: _Setup) -> Learner:
    model = DFlashDrafter(setup.drafter)
    model.init_weights(setup.config.plan.seed)
    model.to(setup.device)
    optimizer = build_optimizer(model, setup.config.optimizer)
    if setup.point is not None:
        weights, moments = load_checkpoint(setup.point.checkpoint)
        model.load_state_dict(weights, strict=True)
        load_optimizer_tensors(optimizer, model, moments)
    for parameter in model.parameters():
        # Different machines may draw different bits; one rank's weights are everybody's.
        setup.world.copy_from_first(parameter.data)
    dtype = torch.bfloat16 if setup.config.hardware.autocast == "bfloat16" else torch.float32
    frozen = FrozenTarget.load(setup.samples.stores[0].path / "target", device=setup.device, dtype=dtype)
    return Learner(
        model,
        optimizer,
        frozen,
        attention=setup.attention,
        max_grad_norm=setup.config.optimizer.max_grad_norm,
        world=setup.world,
    )


def _first_state(setup: _Setup) -> TrainState:
    fresh = {"attempt": setup.attempt, "plan_fingerprint": setup.plan.fingerprint(), "files": {}}
    if setup.point is not None:
        return setup.point.state.model_copy(update=fresh | {"versions": _versions()})
    return TrainState(
        step=0,
        **fresh,
        store_fingerprints=setup.samples.fingerprints,
        drafter_fingerprint=setup.drafter.fingerprint(),
        settings_fingerprint=fingerprint_of_json(setup.settings),
        threads=setup.threads,
        skipped_steps=0,
        consecutive_skipped_steps=0,
        best_step=None,
        best_loss=None,
        versions=_versions(),
    )


def _make_work(setup: _Setup) -> Work:
    config, samples, plan = setup.config, setup.samples, setup.plan
    anchors_of_row = anchors_of_rows(samples, config)
    return Work(
        config=config,
        plan=plan,
        reader=_make_reader(config, samples, setup.drafter, setup.device),
        anchors_of_row=anchors_of_row,
        costs=batch_costs(plan, samples, anchors_of_row, setup.drafter.block_size),
        composition=Composition(plan, samples, anchors_of_row),
        held_out=evaluation_requests(samples, config),
    )


def _make_reader(config: TrainConfig, samples: Samples, drafter: DrafterConfig, device: torch.device) -> BatchReader:
    return BatchReader(
        samples=samples,
        drafter=drafter,
        columns=drafter.columns_of(samples.stores[0].manifest.target_layer_ids),
        gamma=resolve_decay_gamma(config.loss.loss_decay_gamma, drafter.block_size),
        seed=config.plan.seed,
        pin_memory=device.type == "cuda",
    )


def _open_outputs(
    stack: ExitStack, run_dir: Path, config: TrainConfig, plan: BatchPlan, from_step: int, progress: TrainProgress
) -> Outputs:
    log = RunLog(run_dir)
    stack.callback(log.close)
    curves = stack.enter_context(Curves(run_dir, from_step=from_step, num_steps=plan.num_steps))
    if from_step == 0:
        curves.write_settings(_flatten(config.model_dump(mode="json")))
    saver = CheckpointSaver(run_dir, keep=config.checkpoint.save_total_limit, report=progress.say)
    stack.callback(saver.join)
    return Outputs(run_dir=run_dir, log=log, curves=curves, saver=saver)


def _describe(config: TrainConfig, samples: Samples, drafter: DrafterConfig, device: torch.device) -> dict[str, Any]:
    from dflash_tools.train.world import OneProcess

    plan = plan_training(samples, config)
    gamma = resolve_decay_gamma(config.loss.loss_decay_gamma, drafter.block_size)
    attention = _choose_attention(config, device)
    setup = _Setup(
        config=config,
        samples=samples,
        drafter=drafter,
        device=device,
        attention=attention,
        threads=choose_threads(config.hardware.threads),
        world=OneProcess(),
        plan=plan,
        settings=settings_of(config, gamma=gamma, attention=attention, device_type=device.type),
        point=None,
        attempt=0,
    )
    return describe_run(_make_work(setup), _make_learner(setup))


def _resolve_drafter(config: TrainConfig, samples: Samples) -> DrafterConfig:
    store = samples.stores[0]
    path = store.path / "target" / "config.json"
    try:
        target_config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise StoreError(f"{path}: unreadable ({error}); extract again, or restore it from a copy") from None
    return resolve_drafter(config.drafter, target_config, store.manifest)


def _resume_plan(run_dir: Path, point: ResumePoint, samples: Samples, config: TrainConfig) -> BatchPlan:
    if point.plan.settings == config.plan.model_dump(mode="json"):
        return point.plan  # as it was saved: another NumPy might shuffle differently
    plan = plan_training(samples, config)
    check_extension(run_dir, point.plan, plan, point.state.step)
    return plan


def _choose_attention(config: TrainConfig, device: torch.device) -> AttentionPath:
    setting = config.hardware.attention
    if setting == "auto":
        return "flex" if device.type == "cuda" else "split"
    return setting


def _is_evaluated(run_dir: Path, point: ResumePoint | None) -> bool:
    """Whether the attempt that wrote the checkpoint has evaluated these very weights before it saved them."""
    if point is None:
        return False
    record = read_evaluations(run_dir).get(point.state.step)
    return record is not None and record.attempt == point.state.attempt


def _versions() -> dict[str, str]:
    return {
        "dflash-tools": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def _name_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _flatten(tables: dict[str, Any]) -> dict[str, Any]:
    return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}


class _Threads:
    """Sets torch's CPU threads, part of what makes bits repeat, and puts the earlier number back."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._earlier = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._earlier)
