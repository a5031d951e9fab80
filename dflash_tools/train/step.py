"""One optimizer update: gradients of all batches of the step, divided once by the step's total label weight.

The gradient of a step is that of (sum of slot weight x loss) / (sum of slot weights) over every batch on every rank, so
how a step is cut into batches and ranks does not matter but for the order of float additions.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_tools.drafter.distill import teacher_rows
from dflash_tools.drafter.frozen import FrozenTarget
from dflash_tools.drafter.loss import CROSS_ENTROPY, LossSums, Objective, block_loss
from dflash_tools.drafter.model import AttentionPath, DFlashDrafter
from dflash_tools.train.average import AveragedWeights
from dflash_tools.train.batch import Batch
from dflash_tools.train.figures import figures_row, num_columns
from dflash_tools.train.optimizer import DrafterOptimizer, copy_named, trainable_parameters
from dflash_tools.train.world import World

_MASTER = "master."


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What became of the gradient of a step."""

    grad_norm: float  # before clipping; 0 without any supervised slot
    skipped: bool  # the gradient was not finite


class Learner:
    """The drafter, its optimizer and one flat gradient, which all batches of a step are added into.

    With ``averages`` the model holds the masters, which are trained, and the averages are what is measured and saved
    as the drafter.
    """

    def __init__(
        self,
        model: DFlashDrafter,
        optimizer: DrafterOptimizer,
        frozen: FrozenTarget,
        *,
        averages: AveragedWeights | None,
        objective: Objective,
        last_hidden_is_normed: bool,
        attention: AttentionPath,
        recompute_layers: bool,
        max_grad_norm: float,
        world: World,
    ) -> None:
        """Give every parameter a view of one zeroed buffer as its gradient."""
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self._averages = averages
        self._frozen = frozen
        self._objective = objective
        self._last_hidden_is_normed = last_hidden_is_normed
        self._attention = attention
        self._recompute_layers = recompute_layers
        self._max_grad_norm = max_grad_norm
        parameters = list(trainable_parameters(model).values())
        self.device = parameters[0].device
        self._gradient = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=self.device)
        start = 0
        for parameter in parameters:
            parameter.grad = self._gradient[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        return self._gradient.numel()

    @property
    def num_state_bytes(self) -> int:
        """Memory of weights, moments and averages: what a checkpoint holds."""
        return sum(t.numel() * t.element_size() for part in self.tensors() for t in part.values())

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint holds: the drafter, and all that training needs besides; views, not copies."""
        masters = self.model.state_dict()
        if self._averages is None:
            return masters, self.optimizer.tensors()
        return self._averages.tensors(), self.optimizer.tensors() | {_MASTER + n: t for n, t in masters.items()}

    def load(self, drafter: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Put back what ``tensors`` gave, bit for bit.

        Raises:
            ValueError: If names or shapes are others.
        """
        own_drafter, own_optimizer = self.tensors()
        copy_named(own_drafter, drafter, "drafter")
        copy_named(own_optimizer, optimizer, "optimizer state")

    def measured_weights(self) -> AbstractContextManager[None]:
        """Let ``measure`` see the averages, if there are any."""
        return nullcontext() if self._averages is None else self._averages.in_model()

    def make_table(self, num_batches: int) -> Tensor:
        """Room for the figures of some batches, zeroed. Shape: (num_batches, num_columns), float64."""
        shape = (num_batches, num_columns(self.model.config.block_size))
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def accumulate(self, batch: Batch, row: Tensor) -> None:
        """Add the gradient of one batch's weighted sum.

        Args:
            batch: Any number of blocks, also none.
            row: Gets the batch's figures. Shape: (num_columns,).
        """
        if len(batch.blocks) == 0:
            return
        batch = batch.to(self.device)
        sums = self._forward(batch, self._objective)
        sums.weighted_sum.backward()  # type: ignore[no-untyped-call]
        row.copy_(figures_row(sums, batch.blocks))

    @torch.no_grad()
    def measure(self, batch: Batch, row: Tensor) -> None:
        """Compute the figures of one batch; nothing of the training state is touched.

        The loss is the one that is trained, but for D-PACE, whose weights follow the drafter: cross-entropy with fixed
        weights stands for it.
        """
        if len(batch.blocks) == 0:
            return
        batch = batch.to(self.device)
        objective = CROSS_ENTROPY if self._objective.type == "dpace" else self._objective
        row.copy_(figures_row(self._forward(batch, objective), batch.blocks))

    def probe(self, batch: Batch) -> None:
        """Run forward and backward of a batch for its memory alone; the gradient is dropped."""
        self.accumulate(batch, self.make_table(1)[0])
        self._gradient.zero_()

    @torch.no_grad()
    def update(self, label_weight: float, schedule_factor: float) -> Update:
        """Combine the gradients of all ranks and make one update.

        Args:
            label_weight: Sum of the slot weights of the whole step, on all ranks.
            schedule_factor: Share of the peak learning rates.

        Returns:
            The norm before clipping. A gradient that is not finite, or of no supervised slot at all, leaves weights,
            moments, averages and the optimizer's count untouched.
        """
        gradient = self._gradient
        self.world.sum_in_place(gradient)
        if label_weight == 0:
            gradient.zero_()
            return Update(grad_norm=0.0, skipped=False)
        gradient.div_(label_weight)
        grad_norm = float(torch.linalg.vector_norm(gradient))
        finite = math.isfinite(grad_norm)
        if finite:
            if grad_norm > self._max_grad_norm:
                gradient.mul_(self._max_grad_norm / grad_norm)
            self.optimizer.step(schedule_factor)
            if self._averages is not None:
                self._averages.follow(self.optimizer.num_updates)
        gradient.zero_()
        return Update(grad_norm=grad_norm, skipped=not finite)

    def _forward(self, batch: Batch, objective: Objective) -> LossSums:
        hidden_ASH = self.model(
            batch.context,
            batch.blocks,
            self._frozen.embedding_VH,
            self._attention,
            recompute_layers=self._recompute_layers,
        )
        teacher_NH = None
        if objective.needs_teacher and batch.last_hidden_TH is not None:
            teacher_NH = teacher_rows(
                batch.last_hidden_TH, batch.context, batch.blocks, self._frozen, normed=self._last_hidden_is_normed
            )
        return block_loss(hidden_ASH, batch.blocks, self._frozen.head, objective, teacher_NH)


def name_batches(batches: Sequence[int], table: Tensor, sample_ids: Sequence[Sequence[str]]) -> str:
    """Name the batches to suspect after a gradient that was not finite: those with such a loss, else all of the step.

    Args:
        batches: Positions of the step's batches in the plan.
        table: Their figures, on the CPU. Shape: (num_batches, num_columns).
        sample_ids: Samples of each batch.
    """
    suspects = [i for i, loss in enumerate(table[:, 0].tolist()) if not math.isfinite(loss)]
    named = [f"batch {batches[i]} (samples {', '.join(sample_ids[i])})" for i in suspects or range(len(batches))]
    return ("loss not finite in " if suspects else "all losses finite, gradient not: ") + "; ".join(named)
