"""This trainer beside an honest naive loop: same drafter, same samples, same anchors; one JSON.

    python tests/benchmarks/naive_loop.py [--store STORE] [--rounds 5] [--slots-per-round 12000] [--threads 2]

The naive loop is the one that is written first: random batches of a fixed number of samples, states padded to the
longest, one dense mask over padded context and all slots, logits of every slot at once in float32, the mean over the
batch. The other side is what ``train`` runs: planned batches of one bucket, nothing padded, attention in parts, only
supervised slots through the head, read ahead by threads. Both have bfloat16 products over float32 weights and AdamW.

In every round each side trains until it has seen the same number of further supervised slots, one side after the
other, so that both see the same machine. Held-out loss is measured after each round, outside the clock. Without
``--store`` a store of skewed lengths is made, of text that can be learned in part.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash_tools.config import TrainConfig
from dflash_tools.drafter.anchors import draw_anchors
from dflash_tools.drafter.blocks import Blocks, build_blocks
from dflash_tools.drafter.layers import make_rotation
from dflash_tools.train.batch import BatchRequest
from dflash_tools.train.feed import Feed
from dflash_tools.train.figures import pool
from dflash_tools.train.setup import make_learner, make_setup, make_work
from dflash_tools.train.step import Learner
from dflash_tools.train.stores import open_samples
from dflash_tools.train.work import Work
from dflash_tools.train.world import OneProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_store as made

HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE = 256, 3, 4096
SAMPLES_PER_STEP = 8


def make_learnable_store(path: Path, num_samples: int) -> Path:
    """Lengths log-normal around 300. A token is mostly followed by a fixed other one, else drawn by rank (Zipf); the
    states are a noisy embedding of the tokens."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(300), 0.8, num_samples), 32, 2048).astype(int).tolist()
    follower = generator.permutation(VOCAB_SIZE - 4) + 4
    table = generator.standard_normal((VOCAB_SIZE, NUM_LAYERS, HIDDEN_SIZE), dtype=np.float32)
    shares = 1.0 / np.arange(1, VOCAB_SIZE - 3)
    texts = {}

    def tokens(i: int, length: int, vocab_size: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        draw = np.random.default_rng([seed, i, 7])
        ids = draw.choice(np.arange(4, vocab_size), size=length, p=shares / shares.sum()).astype(np.int32)
        for place in np.flatnonzero(draw.random(length - 1) < 0.8) + 1:
            ids[place] = follower[ids[place - 1] - 4]
        texts[i] = ids
        mask = np.ones(length, dtype=np.uint8)
        mask[: length // 3] = 0
        return ids, mask

    def states(i: int, length: int, num_layers: int, hidden_size: int, seed: int = 0) -> NDArray[np.uint16]:
        noise = np.random.default_rng([seed, i]).standard_normal((length, num_layers, hidden_size), dtype=np.float32)
        return made.to_bf16_bits(table[texts[i]] + 0.3 * noise)

    made._tokens, made.make_states = tokens, states
    return made.make_store(
        path,
        lengths,
        edges=sorted({int(edge) for edge in np.quantile(lengths, [0.25, 0.5, 0.75, 1.0])}),
        hidden_size=HIDDEN_SIZE,
        num_layers=NUM_LAYERS,
        vocab_size=VOCAB_SIZE,
        validation_rows=range(0, num_samples, 16),
    )


class Planned:
    """The steps of ``train``, without log and checkpoints."""

    def __init__(self, learner: Learner, work: Work) -> None:
        self._learner = learner
        self._work = work
        self._step = 0
        hardware = work.config.hardware
        self._feed = Feed(
            work.requests(0, 0, 1),
            work.reader.read,
            num_bytes=work.reader.num_bytes,
            max_bytes=hardware.prefetch_bytes,
        )

    def step(self) -> tuple[int, int]:
        """Make one update. Returns real tokens and supervised slots."""
        batches = self._work.plan.batches_of_step(self._step)
        table = self._learner.make_table(len(batches))
        num_tokens = num_slots = 0
        for position in range(len(batches)):
            batch = next(self._feed)
            self._learner.accumulate(batch, table[position])
            num_tokens += int(batch.request.num_tokens.sum())
            num_slots += batch.blocks.num_slots
        self._learner.update(pool(table).label_weight, 1.0)
        self._step += 1
        return num_tokens, num_slots

    def close(self) -> None:
        self._feed.__exit__(None, None, None)


class Naive:
    """Random fixed-size batches, padded to the longest; a dense mask; the logits of every slot."""

    def __init__(self, learner: Learner, work: Work) -> None:
        self.model = learner.model
        self._work = work
        self._frozen = learner._frozen
        settings = work.config.optimizer
        self._max_grad_norm = settings.max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=0.0,
            fused=True,
        )
        self._rows = self._shuffle()

    def step(self) -> tuple[int, int]:
        """Make one update. Returns real tokens and supervised slots."""
        rows = [next(self._rows) for _ in range(SAMPLES_PER_STEP)]
        self._optimizer.zero_grad(set_to_none=True)
        weighted_sum, label_weight, num_tokens, num_slots = self.loss(rows, epoch=self._epoch)
        (weighted_sum / label_weight).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return num_tokens, num_slots

    def loss(self, rows: list[int], epoch: int) -> tuple[Tensor, float, int, int]:
        """Sum of weighted losses, sum of weights, real tokens and supervised slots of samples."""
        drafter, samples = self._work.reader.drafter, self._work.reader.samples
        read = [store.read([row])[0] for store, row in map(samples.locate, rows)]
        num_blocks = self._work.config.loss.num_anchors
        blocks = [
            build_blocks(
                [sample.input_ids],
                [sample.loss_mask],
                [
                    draw_anchors(
                        sample.loss_mask,
                        num_blocks,
                        seed=self._work.reader.seed,
                        epoch=epoch,
                        sample_id=str(samples.sample_ids[row]),
                    )
                ],
                block_size=drafter.block_size,
                mask_token_id=drafter.mask_token_id,
                gamma=self._work.reader.gamma,
            )
            for row, sample in zip(rows, read, strict=True)
        ]
        longest = max(len(sample.input_ids) for sample in read)
        states = torch.zeros(len(rows), longest, *read[0].hidden_states.shape[1:], dtype=torch.bfloat16)
        for place, sample in enumerate(read):
            states[place, : len(sample.input_ids)] = torch.from_numpy(sample.hidden_states).view(torch.bfloat16)
        hidden_BQH = self._forward(states, blocks, num_blocks)
        logits = self._frozen.head.logits(hidden_BQH).float()
        labels = torch.stack([_fill(one.labels_AS, num_blocks, -100) for one in blocks]).flatten()
        weights = torch.stack([_fill(one.weights_AS, num_blocks, 0) for one in blocks]).flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="none")
        return (
            (losses * weights).sum(),
            sum(one.label_weight for one in blocks),
            sum(len(sample.input_ids) for sample in read),
            sum(one.num_slots for one in blocks),
        )

    def _forward(self, states_BTKH: Tensor, blocks: list[Blocks], num_blocks: int) -> Tensor:
        model, config, embedding_VH = self.model, self.model.config, self._frozen.embedding_VH
        dtype = embedding_VH.dtype
        anchors_BA = torch.stack([_fill(one.anchors_A, num_blocks, 0) for one in blocks])
        ids_BQ = torch.stack([_fill(one.ids_AS, num_blocks, config.mask_token_id).flatten() for one in blocks])
        slots_BQ = (anchors_BA[..., None] + torch.arange(config.block_size)).flatten(1)
        tokens_T = torch.arange(states_BTKH.shape[1])
        at_tokens = make_rotation(tokens_T, config.head_dim, config.rope_theta, dtype)
        at_slots = make_rotation(slots_BQ, config.head_dim, config.rope_theta, dtype)
        anchors_BQ = anchors_BA.repeat_interleave(config.block_size, dim=1)
        block_of_Q = torch.arange(num_blocks).repeat_interleave(config.block_size)
        in_context = tokens_T < anchors_BQ[..., None]
        in_block = (block_of_Q[:, None] == block_of_Q).expand(len(blocks), -1, -1)
        visible = torch.cat((in_context, in_block), dim=2)[:, None]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))

        def attend(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, slides: bool) -> Tensor:
            keys, values = torch.cat((ck, bk), dim=1).transpose(1, 2), torch.cat((cv, bv), dim=1).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True)
            return mixed.transpose(1, 2)

        context_BTH = model.project_context(states_BTKH.to(dtype))
        x_BQH = F.embedding(ids_BQ, embedding_VH)
        for layer in model.layers:
            x_BQH = layer(x_BQH, at_slots, layer.self_attn.keys_and_values(context_BTH, at_tokens), attend)
        return model.norm(x_BQH)

    def _shuffle(self) -> Iterator[int]:
        rows = self._work.reader.samples.columns.is_training.nonzero()[0]
        generator = np.random.default_rng(0)
        for self._epoch in range(1_000_000):
            order = generator.permutation(rows)
            yield from order[: len(order) // SAMPLES_PER_STEP * SAMPLES_PER_STEP].tolist()


def _fill(values: Tensor, length: int, filling: int) -> Tensor:
    filled = values.new_full((length, *values.shape[1:]), filling)
    filled[: len(values)] = values
    return filled


def held_out_loss(learner: Learner, work: Work) -> float:
    table = learner.make_table(len(work.held_out))
    for request in work.held_out:
        learner.measure(work.reader.read(request), table[request.batch])
    return pool(table).loss


def difference_of_losses(planned: Learner, naive: Naive, work: Work) -> float:
    """Relative difference of both losses on the same samples and anchors, fresh weights: proof that they are one."""
    request: BatchRequest = work.request(0)
    row = planned.make_table(1)[0]
    planned.measure(work.reader.read(request), row)
    with torch.no_grad():
        weighted_sum, label_weight, _, _ = naive.loss(request.rows.tolist(), epoch=request.epoch)
    return abs(float(weighted_sum) / label_weight / float(row[0] / row[1]) - 1)


def run_until(step: Callable[[], tuple[int, int]], num_slots: int) -> tuple[float, int, int]:
    """Train until ``num_slots`` more slots were seen. Returns seconds, tokens and slots."""
    started, tokens, slots = time.perf_counter(), 0, 0
    while slots < num_slots:
        new_tokens, new_slots = step()
        tokens, slots = tokens + new_tokens, slots + new_slots
    return time.perf_counter() - started, tokens, slots


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots-per-round", type=int, default=12_000)
    parser.add_argument("--samples", type=int, default=384)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        store = options.store or make_learnable_store(Path(scratch) / "store", options.samples)
        print(json.dumps(compare(store, options.rounds, options.slots_per_round, options.threads), indent=2))


def compare(store: Path, num_rounds: int, slots_per_round: int, threads: int) -> dict[str, object]:
    config = TrainConfig.model_validate(
        {
            "drafter": {"num_hidden_layers": 3, "block_size": 8},
            "plan": {"max_batch_size": 4, "batches_per_step": SAMPLES_PER_STEP // 4, "num_epochs": 100},
            "loss": {"num_anchors": 32},
            "optimizer": {"learning_rate": 1e-3},
            "evaluation": {"num_anchors": 32},
            "hardware": {"device": "cpu"},
        }
    )
    setup = make_setup(config, open_samples([store]), torch.device("cpu"), OneProcess(), None, store)
    work, learners = make_work(setup), {"planned": make_learner(setup), "naive": make_learner(setup)}
    planned, naive = Planned(learners["planned"], work), Naive(learners["naive"], work)
    difference = difference_of_losses(learners["planned"], naive, work)
    first_loss = held_out_loss(learners["planned"], work)
    seconds: dict[str, list[float]] = {"planned": [], "naive": []}
    rates: dict[str, list[float]] = {"planned": [], "naive": []}
    losses: dict[str, list[float]] = {"planned": [], "naive": []}
    slots_seen: dict[str, int] = {"planned": 0, "naive": 0}
    sides = {"planned": planned.step, "naive": naive.step}
    for side in sides.values():
        side()
    for number in range(num_rounds):
        # Who goes first alternates.
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            spent, tokens, slots = run_until(sides[name], (number + 1) * slots_per_round - slots_seen[name])
            slots_seen[name] += slots
            seconds[name].append(spent)
            rates[name].append(tokens / spent)
            losses[name].append(held_out_loss(learners[name], work))
    planned.close()
    ratios = [fast / slow for fast, slow in zip(rates["planned"], rates["naive"], strict=True)]
    return {
        "machine": platform.processor() or platform.machine(),
        "threads": threads,
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "num_parameters": learners["planned"].num_parameters,
        "relative_difference_of_first_losses": difference,
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "planned_over_naive": spread(ratios),
        "supervised_slots": slots_seen,
        "seconds": seconds,
        "held_out_loss": {"before": first_loss, **losses},
    }


if __name__ == "__main__":
    main()
