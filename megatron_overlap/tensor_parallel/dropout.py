"""Dropout with masks that are hashes of global positions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.autograd import Function

from megatron_overlap.tensor_parallel.random import keep_mask


class Site(IntEnum):
    """Where in a layer a mask is drawn."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3

    def of_layer(self, layer: int) -> int:
        """A number of its own for every (layer, site)."""
        return 4 * layer + int(self)


@dataclass(frozen=True)
class TokenKeys:
    """Keys of the tokens of a microbatch: `whole` `[n]` for all rows, `rows` for those held here (`[n/t]` under
    sequence parallelism). None at evaluation, when nothing is dropped."""

    whole: torch.Tensor
    rows: torch.Tensor


def add_dropped(
    x: torch.Tensor, residual: torch.Tensor | None, keys: torch.Tensor, site: int, drop: float
) -> torch.Tensor:
    """`residual + dropout(x)`, `[n, h]`, the mask a hash of (key, site, channel)."""
    dropped = _Dropout.apply(x, keep_mask(keys, site, x.shape[-1], drop), 1.0 / (1.0 - drop))
    return dropped if residual is None else residual + dropped


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad_output * keep).mul_(ctx.scale), None, None


def drop_probabilities(probabilities: torch.Tensor, keep: torch.Tensor, drop: float) -> torch.Tensor:
    """Attention dropout on `[b, heads, s, s]` with an explicit mask of the same shape."""
    return _Dropout.apply(probabilities, keep, 1.0 / (1.0 - drop))
