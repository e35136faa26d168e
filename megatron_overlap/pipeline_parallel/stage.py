"""Forward and backward of one microbatch on one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
LossFunc = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class MicrobatchLoss:
    """Sums over the tokens of one microbatch that count: scalars. `report`: what else the loss function gave."""

    total: torch.Tensor
    num_tokens: torch.Tensor
    report: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Kept:
    """What a backward needs of its forward."""

    rows: torch.Tensor | None
    output: torch.Tensor


class Stage:
    """A module that holds one contiguous run of layers, and the microbatches between its forward and backward.

    `module(batch, rows)` gives the rows for the next stage; on the last stage its output goes to `loss_func`, which
    gives (sum of losses, number of tokens, report). `loss_scale` is the one place where anything is averaged: a
    microbatch's mean loss times it is what backward starts from, so gradients of all microbatches and replicas are
    plain sums.
    """

    def __init__(self, number: int, module: nn.Module, *, loss_func: LossFunc | None) -> None:
        self.number = number
        self.module = module
        self.loss_func = loss_func
        self.losses: list[MicrobatchLoss] = []
        self._kept: dict[int, _Kept] = {}

    @property
    def is_last(self) -> bool:
        return self.loss_func is not None

    def forward(
        self, microbatch: int, batch: Batch, rows: torch.Tensor | None, loss_scale: float | None
    ) -> torch.Tensor | None:
        """Rows for the next stage, detached, or None on the last. `loss_scale` None: evaluation, nothing is kept."""
        training = loss_scale is not None
        if rows is not None and training:
            rows.requires_grad_()
        with torch.set_grad_enabled(training):
            output = self.module(batch, rows)
            if self.loss_func is not None:
                output = self._loss(batch, output, loss_scale)
        if training:
            self._kept[microbatch] = _Kept(rows, output)
        return None if self.is_last else output.detach()

    def backward(self, microbatch: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient of the stage's input rows (None on the first stage) from that of its output (None on the last)."""
        kept = self._kept.pop(microbatch)
        torch.autograd.backward(kept.output, grad)
        return None if kept.rows is None else kept.rows.grad

    def take_losses(self) -> list[MicrobatchLoss]:
        """The losses of the microbatches since the last call, in their order."""
        losses, self.losses = self.losses, []
        return losses

    def assert_empty(self) -> None:
        assert not self._kept, f"stage {self.number}: microbatches {sorted(self._kept)} had no backward"

    def _loss(self, batch: Batch, output: torch.Tensor, loss_scale: float | None) -> torch.Tensor:
        assert self.loss_func is not None
        total, num_tokens, report = self.loss_func(batch, output)
        detached = {name: value.detach() for name, value in report.items()}
        self.losses.append(MicrobatchLoss(total.detach(), num_tokens.detach(), detached))
        if loss_scale is None:
            return total
        return total / num_tokens.clamp(min=1) * loss_scale
