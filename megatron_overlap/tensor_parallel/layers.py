"""Megatron's layer classes: they own parameters, the functions beside them do the maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron_overlap.comm import Channel
from megatron_overlap.tensor_parallel.linear import column_parallel_linear, row_parallel_linear
from megatron_overlap.tensor_parallel.parameter import Partition, Piece

Fill = Callable[[torch.Tensor, Piece], None]


@dataclass(frozen=True)
class LayerContext:
    """What every tensor-parallel layer of a model shares."""

    tp: Channel
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


def share(size: int, tp: Channel, what: str) -> int:
    """This rank's part of `size`; ValueError where it does not divide."""
    if size % tp.size:
        raise ValueError(f"{what} = {size} does not divide by --tensor-model-parallel-size {tp.size}")
    return size // tp.size


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with W's rows cut over tp: `[..., in]` -> `[..., out/t]`.

    Under sequence parallelism the input is this rank's part along dim 0 and is gathered. `gated`: W stacks two
    halves [gate; up], each cut over tp by itself.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        context: LayerContext,
        *,
        fill: Fill,
        bias: bool = True,
        gated: bool = False,
        name: str = "column",
    ) -> None:
        super().__init__()
        self.context, self.name = context, name
        tp = context.tp
        local = 2 * share(out_size // 2, tp, name) if gated else share(out_size, tp, name)
        cut = {"dim": 0, "index": tp.rank, "count": tp.size, "gated": gated}
        self.weight = context.empty(local, in_size)
        self.weight.partition = Partition((out_size, in_size), fill=fill, **cut)  # type: ignore[attr-defined,arg-type]
        self.bias = context.empty(local) if bias else None
        if self.bias is not None:
            self.bias.partition = Partition((out_size,), fill=fill_zero, **cut)  # type: ignore[attr-defined,arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        context = self.context
        y = column_parallel_linear(
            rows, self.weight, self.bias, context.tp, sequence_parallel=context.sequence_parallel, name=self.name
        )
        return y.view(-1, *x.shape[1:-1], y.shape[-1])


class RowParallelLinear(nn.Module):
    """`y = sum over ranks of x W^T, + b` with W's columns cut over tp: `[..., in/t]` -> `[..., out]`.

    Under sequence parallelism the output is this rank's part along dim 0.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        context: LayerContext,
        *,
        fill: Fill,
        bias: bool = True,
        name: str = "row",
    ) -> None:
        super().__init__()
        self.context, self.name = context, name
        tp = context.tp
        self.weight = context.empty(out_size, share(in_size, tp, name))
        self.weight.partition = Partition(  # type: ignore[attr-defined]
            (out_size, in_size), dim=1, index=tp.rank, count=tp.size, fill=fill
        )
        self.bias = context.empty(out_size) if bias else None
        if self.bias is not None:
            self.bias.partition = Partition(  # type: ignore[attr-defined]
                (out_size,), partial_grad=context.sequence_parallel, fill=fill_zero
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        context = self.context
        y = row_parallel_linear(
            rows, self.weight, self.bias, context.tp, sequence_parallel=context.sequence_parallel, name=self.name
        )
        return y.view(-1, *x.shape[1:-1], y.shape[-1])


def fill_zero(tensor: torch.Tensor, piece: Piece) -> None:
    """Initial biases."""
    tensor.zero_()


def fill_one(tensor: torch.Tensor, piece: Piece) -> None:
    """Initial norm weights."""
    tensor.fill_(1.0)
