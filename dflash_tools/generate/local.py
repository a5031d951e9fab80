"""The target runs in this process: batches of conversations, each taken through all its turns."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from dflash_tools.config import GenerateConfig, SamplingSection
from dflash_tools.errors import ConfigError
from dflash_tools.generate.dialogue import Answer, Dialogue
from dflash_tools.generate.sampling import Chooser
from dflash_tools.generate.seeds import answer_seed
from dflash_tools.target.load import Target, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# So many conversations are sorted by length before they are cut into batches.
WINDOW = 1024


def load_writer(config: GenerateConfig, tokenizer: "PreTrainedTokenizerBase") -> "LocalWriter":
    """Load the target.

    Raises:
        ConfigError: If it cannot be loaded, or neither it nor its tokenizer says how a turn ends.
    """
    if config.forward.threads != "auto":
        torch.set_num_threads(config.forward.threads)
    target = load_target(config.target)
    stated = getattr(target.model.generation_config, "eos_token_id", None)
    listed = stated if isinstance(stated, list) else [stated]
    stops = sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})
    if not stops:
        raise ConfigError(
            f"target.model = {config.target.model!r}: neither its generation config nor its tokenizer names an "
            "end-of-turn token; set eos_token_id in its generation_config.json"
        )
    return LocalWriter(target, stops, config.sampling, config.forward.token_budget)


class LocalWriter:
    """Answers questions by batched decoding.

    Args:
        target: A loaded target.
        stop_token_ids: An answer ends with the first of these, which it keeps.
        sampling: How tokens are chosen.
        token_budget: Padded tokens of a batch: rows x (longest question + longest answer).
    """

    def __init__(
        self, target: Target, stop_token_ids: Sequence[int], sampling: SamplingSection, token_budget: int
    ) -> None:
        self._target = target
        self._stops = tuple(stop_token_ids)
        self._sampling = sampling
        self._token_budget = token_budget
        # What the checkpoint sets here (a penalty, say) would change the choice unseen.
        target.model.generation_config = _generation_config()

    def answer_all(self, dialogues: Iterator[Dialogue]) -> Iterator[list[Dialogue]]:
        """Answer conversations.

        Yields:
            Conversations that are over, a batch at a time.
        """
        while window := list(islice(dialogues, WINDOW)):
            yield [dialogue for dialogue in window if dialogue.question is None]
            for batch in self._batches([dialogue for dialogue in window if dialogue.question is not None]):
                waiting = batch
                while waiting:
                    # Later turns are longer, so they are cut into batches anew.
                    for part in self._batches(waiting):
                        for dialogue, answer in zip(part, self._answer(part), strict=True):
                            dialogue.take(answer)
                    waiting = [dialogue for dialogue in waiting if dialogue.question is not None]
                yield batch

    def _batches(self, dialogues: list[Dialogue]) -> Iterator[list[Dialogue]]:
        """Cut conversations into batches of similar lengths, the longest first: what does not fit fails at once."""
        batch: list[Dialogue] = []
        width = 0
        for dialogue in sorted(dialogues, key=_num_tokens, reverse=True):
            width = width if batch else _num_tokens(dialogue) + self._sampling.max_new_tokens
            if batch and (len(batch) + 1) * width > self._token_budget:
                yield batch
                batch, width = [], _num_tokens(dialogue) + self._sampling.max_new_tokens
            batch.append(dialogue)
        if batch:
            yield batch

    @torch.inference_mode()
    def _answer(self, batch: Sequence[Dialogue]) -> list[Answer]:
        questions = [dialogue.question or [] for dialogue in batch]
        rooms = [min(dialogue.room, self._sampling.max_new_tokens) for dialogue in batch]
        width = max(map(len, questions))
        padding = self._stops[0]
        # Padding lies on the left, so that all rows go on at the same column; the mask hides it.
        padded = [[padding] * (width - len(question)) + question for question in questions]
        mask = [[0] * (width - len(question)) + [1] * len(question) for question in questions]
        device = self._target.device
        seeds = [answer_seed(self._sampling.seed, dialogue.prompt.id, dialogue.num_answers) for dialogue in batch]
        model: Any = self._target.model
        try:
            output = model.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=_generation_config(
                    max_new_tokens=max(rooms), do_sample=False, eos_token_id=list(self._stops), pad_token_id=padding
                ),
                logits_processor=[Chooser(self._sampling, seeds, max(rooms), device)],
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"forward.token_budget = {self._token_budget}: {len(batch)} questions of up to {width} tokens do not "
                f"fit into the memory of {device}; lower it and run the same command again: what was answered is kept"
            ) from None
        written: list[list[int]] = output[:, width:].tolist()
        return [self._cut(ids, room) for ids, room in zip(written, rooms, strict=True)]

    def _cut(self, ids: list[int], room: int) -> Answer:
        end = next((place + 1 for place, token in enumerate(ids) if token in self._stops), None)
        if end is not None and end <= room:
            return Answer(ids[:end], "stop")
        return Answer(ids[:room], "length")


def _generation_config(**settings: Any) -> Any:
    from transformers import GenerationConfig

    make: Any = GenerationConfig  # transformers does not say the types of its arguments
    return make(**settings)


def _num_tokens(dialogue: Dialogue) -> int:
    return len(dialogue.question or ())
