"""Everything that is decided before step 0: device, stores, drafter, plan, and what a resume may differ in."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from dflash_tools import __version__
from dflash_tools.config import TrainConfig, resolve_path
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.plan import BatchPlan
from dflash_tools.contracts.record import TrainState
from dflash_tools.drafter.config import DrafterConfig, resolve_decay_gamma, resolve_drafter
from dflash_tools.drafter.frozen import FrozenTarget
from dflash_tools.drafter.loss import Objective
from dflash_tools.drafter.model import AttentionPath, DFlashDrafter, resolve_attention
from dflash_tools.drafter.released import initial_weights
from dflash_tools.errors import StoreError
from dflash_tools.store import Store
from dflash_tools.store.manifest_file import check_file
from dflash_tools.train.average import AveragedWeights
from dflash_tools.train.batch import BatchReader
from dflash_tools.train.checkpoint import load_checkpoint
from dflash_tools.train.optimizer import DrafterOptimizer
from dflash_tools.train.records import Composition
from dflash_tools.train.requests import batch_costs, evaluation_requests
from dflash_tools.train.resume import ResumePoint, check_extension, check_same_run, settings_of
from dflash_tools.train.step import Learner
from dflash_tools.train.stores import Samples, anchors_of_rows, plan_training, require_last_hidden
from dflash_tools.train.work import Work
from dflash_tools.train.world import World, choose_threads


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Setup:
    """A run before its first step.

    Attributes:
        config: train.toml with its overrides.
        samples: The stores.
        drafter: The drafter's configuration, every value resolved.
        init_from: Folder of the drafter that a fresh start begins with; None = fresh weights.
        device: Where this rank computes.
        attention: Attention path of the drafter.
        objective: What is minimised.
        threads: CPU threads of this process.
        plan: Every batch of the run.
        settings: What changes the numbers besides plan, stores and drafter.
        point: Where the run goes on; None for a fresh start.
        world: The processes of the run.
    """

    config: TrainConfig
    samples: Samples
    drafter: DrafterConfig
    init_from: Path | None
    device: torch.device
    attention: AttentionPath
    objective: Objective
    threads: int
    plan: BatchPlan
    settings: dict[str, Any]
    point: ResumePoint | None
    world: World

    @property
    def first_step(self) -> int:
        """Updates that are done already."""
        return self.point.state.step if self.point else 0


def make_setup(
    config: TrainConfig,
    samples: Samples,
    device: torch.device,
    world: World,
    point: ResumePoint | None,
    run_dir: Path,
    config_dir: Path = Path(),
) -> Setup:
    """Decide everything before step 0.

    Raises:
        ConfigError: If the drafter or the plan cannot be made of these settings.
        StoreError: If the store's target folder is unreadable, or lacks what the loss needs.
        ResumeError: If the checkpoint belongs to another run.
    """
    drafter = _resolve_drafter(config, samples)
    objective = Objective(type=config.loss.type, dpace_alpha=config.loss.dpace_alpha)
    if objective.needs_teacher:
        require_last_hidden(samples, config.loss.type)
    attention = resolve_attention(config.hardware.attention, device)
    gamma = resolve_decay_gamma(config.loss.loss_decay_gamma, drafter.block_size)
    settings = settings_of(config, gamma=gamma, attention=attention, device_type=device.type)
    init_from = None
    if point is None:
        if config.drafter.init_from is not None:
            init_from = resolve_path(config.drafter.init_from, config_dir)
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
    return Setup(
        config=config,
        samples=samples,
        drafter=drafter,
        init_from=init_from,
        device=device,
        attention=attention,
        objective=objective,
        threads=threads,
        plan=plan,
        settings=settings,
        point=point,
        world=world,
    )


def make_learner(setup: Setup) -> Learner:
    """Make drafter and optimizer: fresh from the seed, from another drafter, or as the checkpoint has them.

    Raises:
        ConfigError: If the drafter to start from is of another shape, or the optimizer is not installed.
    """
    settings = setup.config.optimizer
    model = DFlashDrafter(setup.drafter)
    if setup.init_from is None:
        model.init_weights(setup.config.plan.seed)
    else:
        model.load_state_dict(initial_weights(setup.init_from, setup.drafter))
    model.to(setup.device)
    for parameter in model.parameters():
        # Different machines may draw different bits; the first rank's weights are everybody's.
        setup.world.copy_from_first(parameter.data)
    dtype = torch.bfloat16 if setup.config.hardware.autocast == "bfloat16" else torch.float32
    learner = Learner(
        model,
        DrafterOptimizer(model, settings),
        FrozenTarget.load(_checked_target(setup.samples.stores[0]), device=setup.device, dtype=dtype),
        attention=setup.attention,
        recompute_layers=setup.config.hardware.recompute_layers,
        averages=None if settings.ema_decay is None else AveragedWeights(model, settings.ema_decay),
        objective=setup.objective,
        last_hidden_is_normed=setup.samples.stores[0].manifest.last_hidden_state == "post_norm",
        max_grad_norm=settings.max_grad_norm,
        world=setup.world,
    )
    if setup.point is not None:
        learner.load(*load_checkpoint(setup.point.checkpoint))
    return learner


def _checked_target(store: Store) -> Path:
    """Folder of the frozen parts, once their bytes are those of the manifest: damage there would train in silence."""
    return check_file(store.path, store.manifest, "target/frozen.safetensors").parent


def make_work(setup: Setup) -> Work:
    """Join plan and stores."""
    config, samples, plan, drafter = setup.config, setup.samples, setup.plan, setup.drafter
    anchors_of_row = anchors_of_rows(samples, config)
    reader = BatchReader(
        samples=samples,
        drafter=drafter,
        columns=drafter.columns_of(samples.stores[0].manifest.target_layer_ids),
        gamma=resolve_decay_gamma(config.loss.loss_decay_gamma, drafter.block_size),
        seed=config.plan.seed,
        with_last_hidden=setup.objective.needs_teacher,
        pin_memory=setup.device.type == "cuda",
    )
    return Work(
        config=config,
        plan=plan,
        reader=reader,
        anchors_of_row=anchors_of_row,
        costs=batch_costs(plan, samples, anchors_of_row, drafter.block_size),
        composition=Composition(plan, samples, anchors_of_row),
        held_out=evaluation_requests(samples, config),
    )


def make_state(setup: Setup, attempt: int) -> TrainState:
    """Where this attempt stands at its start."""
    now: dict[str, Any] = {
        "attempt": attempt,
        "plan_fingerprint": setup.plan.fingerprint(),
        "versions": library_versions(),
        "files": {},
    }
    if setup.point is not None:
        return setup.point.state.model_copy(update=now)
    return TrainState(
        step=0,
        store_fingerprints=setup.samples.fingerprints,
        drafter_fingerprint=setup.drafter.fingerprint(),
        settings_fingerprint=fingerprint_of_json(setup.settings),
        threads=setup.threads,
        skipped_steps=0,
        consecutive_skipped_steps=0,
        best_step=None,
        best_loss=None,
        **now,
    )


def library_versions() -> dict[str, str]:
    """Versions that decide the bits of a run."""
    return {
        "dflash-tools": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "torch": str(torch.__version__),
    }


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
