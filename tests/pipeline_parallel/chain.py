"""A chain of tiny stages with a known gradient, for tests of stage and executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_overlap.pipeline_parallel import Batch, LossFunc, MicrobatchLoss, Stage

NUM_ROWS, WIDTH = 3, 5
Gradients = list[torch.Tensor]


class TinyStage(nn.Module):
    """`rows + tanh(rows W + b)`; the first stage takes its rows from the batch, every stage mixes in some of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        rows = batch["x"] if rows is None else rows
        return rows + torch.tanh(rows @ self.weight + self.bias) * batch["gain"]


def squared_error(batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Over the rows that count, whose number differs between microbatches."""
    errors = (rows - batch["y"]).square().sum(1) * batch["mask"]
    return errors.sum(), batch["mask"].sum(), {"largest": errors.max()}


def make_batch(microbatch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(200 + microbatch)
    x, y = (torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(NUM_ROWS) <= microbatch % NUM_ROWS
    return {"x": x, "y": y, "mask": mask.double(), "gain": torch.tensor(1.0 + microbatch)}


def make_stages(numbers: Sequence[int], num_stages: int) -> dict[int, Stage]:
    losses: dict[bool, LossFunc | None] = {True: squared_error, False: None}
    return {number: Stage(number, TinyStage(number), loss_func=losses[number == num_stages - 1]) for number in numbers}


def gradients_of(stage: Stage) -> Gradients:
    return [param.grad.clone() for param in stage.module.parameters() if param.grad is not None]


@dataclass(frozen=True)
class Expected:
    """Gradients by stage, and the losses of all microbatches."""

    gradients: dict[int, Gradients]
    losses: list[MicrobatchLoss]


def run_in_one_piece(num_stages: int, microbatches: int, *, loss_scale: float) -> Expected:
    """Plain autograd through all stages, one microbatch after the other."""
    modules = [TinyStage(number) for number in range(num_stages)]
    losses = []
    for microbatch in range(microbatches):
        batch = make_batch(microbatch)
        rows = None
        for module in modules:
            rows = module(batch, rows)
        assert rows is not None
        total, num_tokens, report = squared_error(batch, rows)
        (total / num_tokens * loss_scale).backward()
        losses.append(
            MicrobatchLoss(total.detach(), num_tokens, {name: value.detach() for name, value in report.items()})
        )
    gradients = {
        number: [param.grad for param in module.parameters() if param.grad is not None]
        for number, module in enumerate(modules)
    }
    return Expected(gradients, losses)
