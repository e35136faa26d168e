"""LayerNorm and RMSNorm over the hidden dimension, whole on every tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from megatron_overlap.tensor_parallel.layers import LayerContext, fill_one, fill_zero
from megatron_overlap.tensor_parallel.parameter import Partition


class Norm(nn.Module):
    """`[..., size]` -> `[..., size]`; `kind` is LayerNorm (weight and bias) or RMSNorm (weight)."""

    def __init__(self, kind: str, size: int, epsilon: float, context: LayerContext) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.centred = kind == "LayerNorm"
        self.weight = context.empty(size)
        self.bias = context.empty(size) if self.centred else None
        for param, fill in ((self.weight, fill_one), (self.bias, fill_zero)):
            if param is not None:
                param.partition = Partition(  # type: ignore[attr-defined]
                    (size,), partial_grad=context.sequence_parallel, fill=fill
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred:
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
