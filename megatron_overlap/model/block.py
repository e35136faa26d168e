"""One transformer block."""

from __future__ import annotations

import torch
from torch import nn

from megatron_overlap.config import ModelConfig
from megatron_overlap.model.attention import SelfAttention
from megatron_overlap.model.inputs import Inputs
from megatron_overlap.model.mlp import MLP
from megatron_overlap.model.norm import Norm
from megatron_overlap.tensor_parallel.dropout import Site, add_dropped
from megatron_overlap.tensor_parallel.layers import LayerContext


class Block(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`, on `[n, h]` rows (sequence parallel: `[n/t, h]`)."""

    def __init__(self, config: ModelConfig, layer: int, seed: int, context: LayerContext) -> None:
        super().__init__()
        self.layer = layer
        self.drop = config.hidden_dropout
        norm = (config.normalization, config.hidden_size, config.norm_epsilon, context)
        self.input_layernorm = Norm(*norm)
        self.self_attention = SelfAttention(config, layer, seed, context)
        self.pre_mlp_layernorm = Norm(*norm)
        self.mlp = MLP(config, seed, context)

    def forward(self, rows: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        attended = self.self_attention(self.input_layernorm(rows), inputs)
        rows = self._add(attended, rows, Site.ATTENTION_OUTPUT, inputs)
        return self._add(self.mlp(self.pre_mlp_layernorm(rows)), rows, Site.MLP_OUTPUT, inputs)

    def _add(self, x: torch.Tensor, residual: torch.Tensor, site: Site, inputs: Inputs) -> torch.Tensor:
        if self.drop == 0 or inputs.keys is None:
            return residual + x
        return add_dropped(x, residual, inputs.keys.rows, site.of_layer(self.layer), self.drop)
