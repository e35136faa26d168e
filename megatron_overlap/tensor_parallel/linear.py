"""Linear functions cut over a tensor-parallel group: maths on tensors, a channel and nothing else.

n rows, t ranks. Column: the weight's rows are cut, `[out/t, in]`; row: its columns, `[out, in/t]`.

column
    forward     y = x W^T + b
    backward    dx = dy W; issue all-reduce of dx; dW += dy^T x behind it; wait
column, sequence parallel
    forward     x = all-gather of x; y = x W^T + b
    backward    issue all-gather of x; dx = dy W behind it; issue reduce-scatter of dx; dW += dy^T x behind it; wait
row
    forward     y = all-reduce of (x W^T), + b
    backward    dx = dy W; dW += dy^T x
row, sequence parallel
    forward     y = reduce-scatter of (x W^T), + b
    backward    dy = all-gather of dy; dx = dy W; dW += dy^T x

A weight gradient goes straight into the main gradient where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from megatron_overlap.backward.gradient import add_row_sum_gradient, add_weight_gradient
from megatron_overlap.comm import Channel


def column_parallel_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Channel,
    *,
    sequence_parallel: bool = False,
    name: str = "column",
) -> torch.Tensor:
    """`[n, in]` (sequence parallel: `[n/t, in]`) -> `[n, out/t]`."""
    return _ColumnParallelLinear.apply(rows, weight, bias, tp, sequence_parallel and tp.size > 1, name)


def row_parallel_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Channel,
    *,
    sequence_parallel: bool = False,
    name: str = "row",
) -> torch.Tensor:
    """`[n, in/t]` -> `[n, out]` (sequence parallel: `[n/t, out]`); the bias is added once, after the sum."""
    return _RowParallelLinear.apply(rows, weight, bias, tp, sequence_parallel and tp.size > 1, name)


class _ColumnParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Channel,
        sequence_parallel: bool,
        name: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.tp, ctx.sequence_parallel, ctx.name = tp, sequence_parallel, name
        if sequence_parallel:
            rows = tp.all_gather(rows, f"{name}.forward").wait()
        return functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        tp: Channel = ctx.tp
        gathering = tp.all_gather(rows, f"{ctx.name}.regather") if ctx.sequence_parallel else None
        reducing = None
        if ctx.needs_input_grad[0]:
            grad_rows = grad_output @ weight
            reduce = tp.reduce_scatter if ctx.sequence_parallel else tp.all_reduce
            reducing = reduce(grad_rows, f"{ctx.name}.dgrad")
        if gathering is not None:
            rows = gathering.wait()
        grad_weight = add_weight_gradient(weight, grad_output, rows) if ctx.needs_input_grad[1] else None
        grad_bias = add_row_sum_gradient(bias, grad_output) if bias is not None else None
        return (reducing.wait() if reducing is not None else None, grad_weight, grad_bias, None, None, None)


class _RowParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Channel,
        sequence_parallel: bool,
        name: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.tp, ctx.sequence_parallel, ctx.name = tp, sequence_parallel, name
        if tp.size == 1:
            return functional.linear(rows, weight, bias)
        partial_sum = functional.linear(rows, weight)
        reduce = tp.reduce_scatter if sequence_parallel else tp.all_reduce
        output = reduce(partial_sum, f"{name}.forward").wait()
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        grad_bias = add_row_sum_gradient(bias, grad_output) if bias is not None else None
        if ctx.sequence_parallel:
            grad_output = ctx.tp.all_gather(grad_output.contiguous(), f"{ctx.name}.backward").wait()
        grad_rows = grad_output @ weight if ctx.needs_input_grad[0] else None
        grad_weight = add_weight_gradient(weight, grad_output, rows) if ctx.needs_input_grad[1] else None
        return (grad_rows, grad_weight, grad_bias, None, None, None)
