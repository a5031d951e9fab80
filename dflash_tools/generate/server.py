"""A server runs the target: many conversations under way at a time, each in a thread of its own."""

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from dflash_tools.config import SamplingSection, ServerSection
from dflash_tools.data.sample import RowError
from dflash_tools.errors import UserError
from dflash_tools.generate.apis import Question
from dflash_tools.generate.client import NO_ANSWER, REFUSED, Client, Stopped
from dflash_tools.generate.dialogue import Dialogue
from dflash_tools.generate.seeds import answer_seed

# After so many failures in a row, or as many as are under way if that is more, the fault is not the prompts'.
MIN_FAILURES = 8


class ServerWriter:
    """Answers questions through a server.

    Args:
        server: The ``[server]`` table.
        sampling: How tokens are chosen.
        model: Name of the target on the server.

    Raises:
        ConfigError: If the address is none, or the environment variable of the key is not set.
    """

    def __init__(self, server: ServerSection, sampling: SamplingSection, model: str) -> None:
        self._client = Client(server)
        self._sampling = sampling
        self._model = model
        self._concurrency = server.concurrency
        self._failures = 0  # in a row

    def answer_all(self, dialogues: Iterator[Dialogue]) -> Iterator[list[Dialogue]]:
        """Answer conversations.

        Yields:
            Conversations that are over, as they end; one that got no answer has a problem ``no_answer``.

        Raises:
            UserError: If the server answers nothing at all.
        """
        tasks: SimpleQueue[Dialogue | None] = SimpleQueue()
        results: SimpleQueue[Dialogue | BaseException] = SimpleQueue()
        # Daemons, so that a command that is stopped does not wait for answers that nobody takes.
        for _ in range(self._concurrency):
            threading.Thread(target=self._work, args=(tasks, results), daemon=True).start()
        under_way = 0
        try:
            while True:
                # Twice as many as can be asked at once, so that no thread waits for the next prompt.
                while under_way < 2 * self._concurrency and (dialogue := next(dialogues, None)):
                    tasks.put(dialogue)
                    under_way += 1
                if not under_way:
                    return
                done = _take_all(results)
                under_way -= len(done)
                yield done
                for dialogue in done:
                    self._count_failures(dialogue)
        finally:
            self._client.stop()
            for _ in range(self._concurrency):
                tasks.put(None)

    def _work(self, tasks: "SimpleQueue[Dialogue | None]", results: "SimpleQueue[Dialogue | BaseException]") -> None:
        while (dialogue := tasks.get()) is not None:
            try:
                self._finish(dialogue)
            except Stopped:
                return
            except BaseException as error:  # whatever it is, the main thread raises it
                results.put(error)
                return
            results.put(dialogue)

    def _finish(self, dialogue: Dialogue) -> None:
        while (token_ids := dialogue.question) is not None:
            question = Question(
                model=self._model,
                token_ids=token_ids,
                max_new_tokens=min(dialogue.room, self._sampling.max_new_tokens),
                sampling=self._sampling,
                seed=answer_seed(self._sampling.seed, dialogue.prompt.id, dialogue.num_answers),
            )
            try:
                answer = self._client.ask(question)
            except RowError as error:
                dialogue.end(error)
                return
            dialogue.take(answer)

    def _count_failures(self, dialogue: Dialogue) -> None:
        problem = dialogue.problem
        if dialogue.num_answers or problem is None or problem.reason not in (NO_ANSWER, REFUSED):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= max(MIN_FAILURES, self._concurrency):
            raise UserError(
                f"{self._failures} prompts in a row got no answer, the last one: {problem.detail}; see to the server, "
                "then run the same command again: what was answered is kept"
            )


def _take_all(results: "SimpleQueue[Dialogue | BaseException]") -> list[Dialogue]:
    """Wait for a result, and take all that are there."""
    found = [results.get()]
    while True:
        try:
            found.append(results.get_nowait())
        except Empty:
            break
    done = []
    for result in found:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
