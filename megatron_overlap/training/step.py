"""One training step and one evaluation, on all stages of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_overlap.comm import Channels
from megatron_overlap.pipeline_parallel import Batch, Executor, MicrobatchLoss, Stage, StepInputs
from megatron_overlap.schedule.actions import Action
from megatron_overlap.schedule.plan import Plan
from megatron_overlap.training.batches import BatchShape, StepBatches


class NotFiniteError(RuntimeError):
    """The loss or the gradient is NaN or infinite; raised on all ranks in the same iteration."""


@dataclass(frozen=True)
class LossSum:
    """Sum over tokens, number of tokens, and sums of what else the loss function reports, over the whole batch."""

    total: float
    num_tokens: float
    report: Mapping[str, float]

    @property
    def mean(self) -> float:
        return self.total / max(self.num_tokens, 1.0)


@dataclass(frozen=True)
class Pass:
    """One run of this rank's action list over `num_microbatches` microbatches per replica."""

    plan: Plan
    pp_rank: int
    num_microbatches: int
    loss_scale: float | None

    @property
    def actions(self) -> Sequence[Action]:
        return self.plan.actions(self.pp_rank)

    def picture(self, index: int) -> str:
        """The schedule of all ranks with one action of this one marked."""
        return self.plan.grid_text(mark=(self.pp_rank, index))


class Passes:
    """Runs passes over the stages of this rank and sums their losses over all ranks."""

    def __init__(self, stages: Mapping[int, Stage], executor: Executor, channels: Channels, shape: BatchShape) -> None:
        self.stages = stages
        self._executor = executor
        self._channels = channels
        self._shape = shape

    def run(self, what: Pass, stream: Iterator[Batch] | None, first_sample: int) -> None:
        """Forward, and backward where there is a loss scale, of one batch."""
        batches = StepBatches(stream, self._shape, first_sample)
        inputs = StepInputs(batch=batches, loss_scale=what.loss_scale, reduce=lambda stage: None)
        for stage in self.stages.values():
            stage.module.train(what.loss_scale is not None)
        self._executor.run(what.actions, inputs, picture=what.picture)

    def sum_losses(self) -> LossSum:
        """The losses of the microbatches since the last call, the same on every rank."""
        losses = [loss for stage in self.stages.values() for loss in stage.take_losses()]
        world, tp = self._channels.world, self._channels.tp
        # Every tensor-parallel rank of the last stage holds the same losses: one of them speaks.
        counted = losses if tp.rank == 0 else []
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for loss in counted:
            total += torch.stack([loss.total.double(), loss.num_tokens.double()])
        pending = world.all_reduce(total, "losses")
        report = self._sum_reports(losses)
        value, num_tokens = pending.wait().tolist()
        return LossSum(value, num_tokens, report)

    def _sum_reports(self, losses: Sequence[MicrobatchLoss]) -> dict[str, float]:
        """Sums over microbatches and replicas; known on the ranks of the last stage, which log them."""
        names = sorted({name for loss in losses for name in loss.report})
        if not names:
            return {}
        sums = torch.stack([torch.stack([loss.report[name].double() for loss in losses]).sum() for name in names])
        return dict(zip(names, self._channels.dp.all_reduce(sums, "loss.reports").wait().tolist(), strict=True))
