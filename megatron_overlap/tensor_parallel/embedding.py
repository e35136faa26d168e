"""Embedding tables: cut over tp by vocabulary rows, or whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from megatron_overlap.backward.gradient import add_indexed_gradient
from megatron_overlap.comm import Channel
from megatron_overlap.tensor_parallel.layers import Fill, LayerContext, share
from megatron_overlap.tensor_parallel.parameter import Partition


class VocabParallelEmbedding(nn.Module):
    """`[n]` token ids -> `[n, h]` rows (sequence parallel: `[n/t, h]`), the table `[Vp/t, h]` cut over tp.

    Rows from `vocab_size` up to `padded_vocab_size` are padding. Ids are not checked here: the data is.
    """

    def __init__(
        self, padded_vocab_size: int, vocab_size: int, hidden_size: int, context: LayerContext, *, fill: Fill
    ) -> None:
        super().__init__()
        self.context = context
        tp = context.tp
        rows = share(padded_vocab_size, tp, "padded vocabulary")
        self.first = tp.rank * rows
        self.weight = context.empty(rows, hidden_size)
        self.weight.partition = Partition(  # type: ignore[attr-defined]
            (padded_vocab_size, hidden_size), dim=0, index=tp.rank, count=tp.size, valid=vocab_size, fill=fill
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        context = self.context
        return _VocabParallelEmbedding.apply(ids, self.weight, self.first, context.tp, context.sequence_parallel)


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[n]` ids -> `[n, h]`, the table whole on this rank; its gradient goes straight into the main gradient."""
    return _Embedding.apply(ids, weight)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids, weight)
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        ids, weight = ctx.saved_tensors
        return None, add_indexed_gradient(weight, ids, grad_output)


class _VocabParallelEmbedding(Function):
    """Each rank gives the rows that it owns, zeros elsewhere; the sum over ranks is the lookup."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, first: int, tp: Channel, sequence_parallel: bool
    ) -> torch.Tensor:
        local = ids - first
        owned = (local >= 0) & (local < weight.shape[0])
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel and tp.size > 1
        ctx.save_for_backward(local, owned, weight)
        if tp.size == 1:
            return weight.index_select(0, local)
        rows = weight.index_select(0, local.masked_fill(~owned, 0)).masked_fill_(~owned[:, None], 0)
        reduce = tp.reduce_scatter if ctx.sequence_parallel else tp.all_reduce
        return reduce(rows, "embedding.forward").wait()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local, owned, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            grad_output = ctx.tp.all_gather(grad_output.contiguous(), "embedding.backward").wait()
        if ctx.tp.size > 1:
            local, grad_output = local[owned], grad_output[owned]
        return None, add_indexed_gradient(weight, local, grad_output), None, None, None
