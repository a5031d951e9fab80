"""Writing checkpoints behind the training loop's back, one at a time."""

from collections.abc import Callable
from concurrent import futures
from pathlib import Path

from dflash_tools.errors import UserError
from dflash_tools.train.checkpoint import Snapshot, remove_old_checkpoints, verify_checkpoint, write_checkpoint


class CheckpointSaver:
    """Writes snapshots in a background thread; at most one is in memory, so memory does not grow.

    A full disk does not end a run: the failure is reported, earlier checkpoints stay, and the next save tries again.
    Only a failed last save is an error. Weights that are not finite end the run, and so does any other error.
    """

    def __init__(self, run_dir: Path, *, keep: int, report: Callable[[str], None]) -> None:
        """Prepare to write into ``run_dir``; ``report`` gets one sentence for each failed save."""
        self._run_dir = run_dir
        self._keep = keep
        self._report = report
        self._save_begun: futures.Future[None] | None = None
        self._verified = False
        self._failure: OSError | None = None
        self.num_saved = 0
        self.num_failed = 0

    def wait(self) -> None:
        """Wait for the save in flight, if any. Call it before taking the next snapshot.

        Raises:
            NonFiniteWeightsError: If a save was refused; any other error of the writer is raised too.
        """
        self.join()
        self.check()

    def join(self) -> None:
        """Wait for the save in flight, whatever it comes to."""
        if self._save_begun is not None:
            futures.wait([self._save_begun])

    def check(self) -> None:
        """Raise what a finished save found, without waiting.

        Raises:
            NonFiniteWeightsError: If a save was refused; any other error of the writer is raised too.
        """
        if self._save_begun is not None and self._save_begun.done():
            self._save_begun.result()

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot; returns at once."""
        self.wait()
        writer = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._save_begun = writer.submit(self._save, snapshot)
        writer.shutdown(wait=False)  # the thread ends with this save

    def close(self) -> None:
        """Finish the save in flight.

        Raises:
            NonFiniteWeightsError: If a save was refused; any other error of the writer is raised too.
            UserError: If the last save failed.
        """
        self.wait()
        if self._failure is not None:
            raise UserError(
                f"{self._run_dir}: the last checkpoint could not be written ({self._failure}); earlier ones are "
                "untouched. Free disk space and run the same command again with --resume."
            )

    def _save(self, snapshot: Snapshot) -> None:
        step = snapshot.state.step
        self._failure = None
        try:
            checkpoint = write_checkpoint(self._run_dir, snapshot)
            if not self._verified:
                # Once per process: shows a broken disk or serialiser in the first minutes rather than at resume.
                verify_checkpoint(checkpoint, snapshot)
                self._verified = True
            remove_old_checkpoints(self._run_dir, newest=step, keep=self._keep, best=snapshot.state.best_step)
        except OSError as error:
            self._failure = error
            self.num_failed += 1
            self._report(f"checkpoint of step {step} could not be written: {error}; training goes on")
        else:
            self.num_saved += 1
