"""The training loop: step, log, evaluate, save, until the plan ends or a signal asks to stop."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_tools.contracts.record import StepRecord, TrainState
from dflash_tools.contracts.run_folder import checkpoint_dir
from dflash_tools.errors import Interrupted, UserError
from dflash_tools.train.batch import Batch, BatchRequest
from dflash_tools.train.checkpoint import take_snapshot, update_state
from dflash_tools.train.curves import Curves
from dflash_tools.train.evaluation import evaluate_held_out, make_evaluation_record
from dflash_tools.train.feed import Feed
from dflash_tools.train.figures import pool
from dflash_tools.train.progress import TrainProgress
from dflash_tools.train.records import StepResult, Timing
from dflash_tools.train.run_log import RunLog
from dflash_tools.train.saver import CheckpointSaver
from dflash_tools.train.schedule import schedule_factor
from dflash_tools.train.signals import StopSignal
from dflash_tools.train.step import Learner, Update, name_batches
from dflash_tools.train.work import Work

MAX_SKIPPED_IN_A_ROW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where a run writes: rank 0 only."""

    run_dir: Path
    log: RunLog
    curves: Curves
    saver: CheckpointSaver


class TrainingLoop:
    """Runs a plan from the state it is given; the whole position is ``state.step``."""

    def __init__(
        self,
        work: Work,
        learner: Learner,
        state: TrainState,
        *,
        outputs: Outputs | None,
        progress: TrainProgress,
        evaluated: bool,
    ) -> None:
        """Prepare; nothing happens before ``run``.

        Args:
            work: Plan and data.
            learner: Drafter and optimizer, already in the state's condition.
            state: Updates done and what goes with them.
            outputs: Log and checkpoints; None on all ranks but the first.
            progress: What a person sees.
            evaluated: The evaluation of the state's step is on record and need not be repeated.
        """
        self.state = state
        self._work = work
        self._learner = learner
        self._outputs = outputs
        self._progress = progress
        self._evaluated_step = state.step if evaluated else None
        self._saved_step = state.step
        self._checkpoint_seconds = 0.0
        self._stop = StopSignal()

    def run(self) -> None:
        """Train to the end of the plan; the last weights are evaluated and saved.

        Raises:
            Interrupted: If a signal came; a checkpoint of the last finished step is on disk.
            UserError: If training cannot go on, e.g. after too many gradients that are not finite.
        """
        work, world = self._work, self._learner.world
        feed = Feed(
            work.requests(self.state.step, world.rank, world.size),
            work.reader.read,
            num_bytes=work.reader.num_bytes,
            max_bytes=work.config.hardware.prefetch_bytes,
        )
        with self._stop, feed:
            signum = self._evaluate_first()
            while not signum and self.state.step < work.plan.num_steps:
                signum = self._train_step(feed) or self._evaluate_if_due()
                self._save_if_due(signum)
            self._finish(signum)

    def _train_step(self, feed: Feed[BatchRequest, Batch]) -> int:
        """Make one update. Returns the signal that any rank has got, or 0."""
        started, waited = time.perf_counter(), feed.wait_seconds
        work, world = self._work, self._learner.world
        step = self.state.step
        batches = work.plan.batches_of_step(step)
        shares = work.shares(step, world.size)
        table = self._learner.make_table(len(batches))
        for batch in shares[world.rank]:
            self._learner.accumulate(next(feed), table[batch - batches.start])
        world.sum_in_place(table)
        table = table.cpu()
        factor = schedule_factor(step, work.plan.num_steps, work.config.optimizer)
        update = self._learner.update(pool(table).label_weight, factor)
        self._count(update)
        wait_seconds = feed.wait_seconds - waited
        timing = Timing(
            data_wait_seconds=wait_seconds,
            compute_seconds=time.perf_counter() - started - wait_seconds,
            checkpoint_seconds=self._checkpoint_seconds,
        )
        rank_of_batch = {batch: rank for rank, share in enumerate(shares) for batch in share}
        result = StepResult(
            step=step,
            attempt=self.state.attempt,
            ranks=tuple(rank_of_batch[batch] for batch in batches),
            table=table,
            grad_norm=update.grad_norm,
            learning_rate=work.config.optimizer.learning_rate * factor,
            skipped=update.skipped,
            timing=timing,
        )
        self._write(work.composition.make_record(result))
        self._stop_if_hopeless(batches, table)
        return self._agree_on_signal()

    def _count(self, update: Update) -> None:
        state = self.state
        self.state = state.model_copy(
            update={
                "step": state.step + 1,
                "skipped_steps": state.skipped_steps + update.skipped,
                "consecutive_skipped_steps": state.consecutive_skipped_steps + 1 if update.skipped else 0,
            }
        )

    def _stop_if_hopeless(self, batches: range, table: Tensor) -> None:
        if self.state.consecutive_skipped_steps < MAX_SKIPPED_IN_A_ROW:
            return
        requests = [self._work.request(batch) for batch in batches]
        ids = self._work.reader.samples.sample_ids
        suspects = name_batches(batches, table, [[str(ids[row]) for row in r.rows] for r in requests])
        raise UserError(
            f"{MAX_SKIPPED_IN_A_ROW} steps in a row had gradients that are not finite, the last one step "
            f"{self.state.step - 1}: {suspects}. No update was made since step "
            f"{self.state.step - MAX_SKIPPED_IN_A_ROW}. Start a new run with a lower optimizer.learning_rate, or with "
            'hardware.autocast = "none"; verify the store with dflash-tools verify --deep'
        )

    def _write(self, record: StepRecord) -> None:
        if self._outputs is None:
            return
        self._checkpoint_seconds = 0.0
        self._outputs.saver.check()
        self._outputs.log.write_step(record)
        self._outputs.curves.write_step(record)
        self._progress.show_step(record)

    def _evaluate_first(self) -> int:
        """Evaluate the weights that the run starts from, unless that is on record."""
        before = self.state
        signum = self._evaluate_if_due()
        if self.state is not before and self._outputs is not None:
            # These weights were saved before they could be evaluated: their checkpoint learns that it is the best.
            update_state(checkpoint_dir(self._outputs.run_dir, self.state.step), self.state)
        return signum

    def _evaluate_if_due(self) -> int:
        """Evaluate if it is time and not on record yet. Returns the signal that cut it short, or 0."""
        step, work = self.state.step, self._work
        due = step % work.config.evaluation.eval_steps == 0 or step == work.plan.num_steps
        if not due or not work.held_out or step == self._evaluated_step:
            return 0
        started = time.perf_counter()
        table = evaluate_held_out(
            self._learner,
            work.reader,
            work.held_out,
            prefetch_bytes=work.config.hardware.prefetch_bytes,
            stop_requested=lambda: self._stop.signum != 0,
        )
        if table is None:
            return self._agree_on_signal()
        record = make_evaluation_record(
            work.held_out,
            table,
            step=step,
            attempt=self.state.attempt,
            seconds=time.perf_counter() - started,
        )
        # Fresh weights are measured but never the best: there is no checkpoint of them.
        if step > 0 and (self.state.best_loss is None or record.loss < self.state.best_loss):
            self.state = self.state.model_copy(update={"best_step": step, "best_loss": record.loss})
        if self._outputs is not None:
            self._outputs.log.write_evaluation(record)
            self._outputs.curves.write_evaluation(record)
            self._progress.show_evaluation(record)
        return 0

    def _save_if_due(self, signum: int) -> None:
        """Save at intervals, at the end, at a new best and before stopping."""
        state = self.state
        due = state.step % self._work.config.checkpoint.save_steps == 0 or state.step == self._work.plan.num_steps
        if due or signum or state.best_step == state.step:
            self._save()

    def _save(self) -> None:
        self._saved_step = self.state.step
        if self._outputs is None:
            return
        started = time.perf_counter()
        saver = self._outputs.saver
        saver.wait()
        snapshot = take_snapshot(self.state, *self._learner.tensors())
        # The log first: a committed checkpoint must never know more than the log on disk.
        self._outputs.log.flush()
        self._outputs.curves.flush()
        saver.start(snapshot)
        self._checkpoint_seconds += time.perf_counter() - started

    def _finish(self, signum: int) -> None:
        if signum and self._saved_step != self.state.step:
            self._save()
        if self._outputs is not None:
            self._outputs.saver.close()
        if signum:
            raise Interrupted(signum)

    def _agree_on_signal(self) -> int:
        """Find out whether any rank has got a signal; 0 if none. Every rank gets the same answer."""
        world = self._learner.world
        if world.size == 1:
            return self._stop.signum
        # One place per rank, so that different signals do not add up to a third.
        signals = torch.zeros(world.size, dtype=torch.int64, device=self._learner.device)
        signals[world.rank] = self._stop.signum
        world.sum_in_place(signals)
        return int(signals.max())
