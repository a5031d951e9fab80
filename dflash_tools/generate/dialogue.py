"""One conversation while it is answered: each turn sees the target's own earlier answers, as in serving."""

from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_tools.data.sample import RowError
from dflash_tools.generate.encoder import PromptEncoder
from dflash_tools.generate.prompts import Message, Prompt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote: its token ids, the end-of-turn token among them, and ``length`` if it was cut."""

    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(slots=True, kw_only=True)
class _Row:
    input_ids: list[int]
    loss_mask: list[int]
    num_messages: int = 0
    finish_reasons: list[str] = field(default_factory=list)


class Dialogue:
    """A prompt with the answers so far.

    Attributes:
        question: Token ids that are to be answered next; None = the conversation is over.
        problem: Why it ended before its last turn; with no answer at all, why the prompt is dropped.
        num_answers: Answers so far.
        num_written: Tokens of these answers.
    """

    def __init__(self, prompt: Prompt, encoder: PromptEncoder) -> None:
        self.prompt = prompt
        self.question: list[int] | None = None
        self.problem: RowError | None = None
        self.num_answers = 0
        self.num_written = 0
        self._encoder = encoder
        self._tools = encoder.mark(prompt.questions.tools)
        self._messages: list[Message] = []
        self._sent: list[Message] = []  # the same, with typed control tokens marked
        self._rows: list[_Row] = []
        self._ask()

    @property
    def room(self) -> int:
        """Tokens that fit behind the question."""
        return self._encoder.max_tokens - len(self.question or ())

    def take(self, answer: Answer) -> None:
        """Add the answer to the question, and ask the next one.

        Where the question begins with all ids so far, the row goes on; where the template rewrote earlier turns, a new
        row begins, in which only this answer counts.
        """
        assert self.question is not None
        row = self._rows[-1] if self._rows else None
        if row is None or self.question[: len(row.input_ids)] != row.input_ids:
            row = _Row(input_ids=[], loss_mask=[])
            self._rows.append(row)
        row.input_ids = self.question + answer.token_ids
        row.loss_mask += [0] * (len(self.question) - len(row.loss_mask)) + [1] * len(answer.token_ids)
        row.finish_reasons.append(answer.finish_reason)
        text = self._encoder.decode(answer.token_ids)
        # Not marked: what looks like a control token here, the target wrote as one.
        self._messages.append({"role": "assistant", "content": text})
        self._sent.append(self._messages[-1])
        row.num_messages = len(self._messages)
        self.num_answers += 1
        self.num_written += len(answer.token_ids)
        self.question = None
        if self.num_answers == len(self.prompt.questions.turns):
            return
        if answer.finish_reason == "length":
            self.end(RowError("truncated", "an answer was cut, so what follows was not asked"))
            return
        self._ask()

    def end(self, problem: RowError) -> None:
        """End the conversation here; the answers so far stay."""
        self.question, self.problem = None, problem

    def entry(self) -> dict[str, Any]:
        """Give the conversation as the journal keeps it."""
        return {
            "id": self.prompt.id,
            "ended_early": self.problem.reason if self.problem else "",
            "rows": [self._row(row, number) for number, row in enumerate(self._rows, start=1)],
        }

    def _row(self, row: _Row, number: int) -> dict[str, Any]:
        """Give a row as ``extract`` reads it; ids and mask exactly as generated."""
        return {
            "id": self.prompt.id if len(self._rows) == 1 else f"{self.prompt.id}-{number}",
            "conversation_id": self.prompt.questions.fingerprint,
            "source": self.prompt.source,
            "source_row": self.prompt.source_row,
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "messages": self._messages[: row.num_messages],
            "finish_reasons": row.finish_reasons,
            "truncated": "length" in row.finish_reasons,
        }

    def _ask(self) -> None:
        turn = self.prompt.questions.turns[self.num_answers]
        sent = [*self._sent, *self._encoder.mark(list(turn))]
        try:
            self.question = self._encoder.encode(sent, self._tools)
        except RowError as error:
            self.end(error)
            return
        self._sent = sent
        self._messages += turn
