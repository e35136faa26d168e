"""The MLP of a block, its inner dimension cut over the tensor-parallel group."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from megatron_overlap.config import ModelConfig
from megatron_overlap.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from megatron_overlap.tensor_parallel.random import normal


class MLP(nn.Module):
    """`[n, h]` rows -> `[n, h]` rows: `fc2(gelu(fc1 x))`, or gated `fc2(silu(gate x) * up x)`."""

    def __init__(self, config: ModelConfig, seed: int, context: LayerContext) -> None:
        super().__init__()
        self.gated = config.swiglu
        self.approximate = config.gelu_approximate
        std = config.init_method_std
        inner = config.ffn_hidden_size
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * inner if self.gated else inner,
            context,
            fill=normal(seed, std),
            bias=config.add_bias_linear,
            gated=self.gated,
            name="fc1",
        )
        self.linear_fc2 = RowParallelLinear(
            inner,
            config.hidden_size,
            context,
            fill=normal(seed, std / math.sqrt(2 * config.num_layers)),
            bias=config.add_bias_linear,
            name="fc2",
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = self.linear_fc1(rows)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.gelu(inner, approximate=self.approximate)
        return self.linear_fc2(inner)
