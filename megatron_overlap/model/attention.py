"""Causal self-attention, heads cut over the tensor-parallel group."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from megatron_overlap.config import ModelConfig
from megatron_overlap.model.inputs import Inputs
from megatron_overlap.model.rotary import Rotary
from megatron_overlap.tensor_parallel.dropout import Site, drop_probabilities
from megatron_overlap.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear, share
from megatron_overlap.tensor_parallel.random import keep_mask, normal


class SelfAttention(nn.Module):
    """`[n, h]` rows -> `[n, h]` rows (sequence parallel: `[n/t, h]` both).

    Rows of `linear_qkv` stand in query groups: the group's query heads, its key head, its value head.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int, context: LayerContext) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.kv_channels
        self.num_groups = share(config.num_query_groups, context.tp, "--num-query-groups")
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.first_head = context.tp.rank * self.num_groups * self.heads_per_group
        self.drop = config.attention_dropout
        self.rotary = make_rotary(config)
        query_size = config.num_attention_heads * config.kv_channels
        std = config.init_method_std
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            query_size + 2 * config.num_query_groups * config.kv_channels,
            context,
            fill=normal(seed, std),
            bias=config.add_bias_linear or config.add_qkv_bias,
            name="qkv",
        )
        self.linear_proj = RowParallelLinear(
            query_size,
            config.hidden_size,
            context,
            fill=normal(seed, std / math.sqrt(2 * config.num_layers)),
            bias=config.add_bias_linear,
            name="proj",
        )

    def forward(self, rows: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        mixed = self.linear_qkv(rows).view(
            inputs.batch_size, inputs.sequence_length, self.num_groups, self.heads_per_group + 2, self.head_size
        )
        query, key, value = mixed.split([self.heads_per_group, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
        if self.rotary is not None:
            cos, sin = inputs.rotary_tables
            query, key = self.rotary.rotate(query, cos, sin), self.rotary.rotate(key, cos, sin)
        context = self._attend(query, key, value, inputs)
        return self.linear_proj(context.reshape(inputs.batch_size * inputs.sequence_length, -1))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """`[b, s, heads, d]` queries, `[b, s, groups, d]` keys and values -> `[b, s, heads, d]`."""
        if self.heads_per_group > 1:
            key, value = (part.repeat_interleave(self.heads_per_group, dim=2) for part in (key, value))
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if self.drop > 0 and inputs.keys is not None:
            return self._attend_with_dropout(query, key, value, inputs).transpose(1, 2)
        mask = inputs.attention_mask
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None if mask is None else ~mask, is_causal=mask is None
        )
        return output.transpose(1, 2)

    def _attend_with_dropout(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        """Attention with an explicit mask over the probabilities, a hash of (sample, head, query, key)."""
        assert inputs.keys is not None
        batch, heads, length, _ = query.shape
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_size)
        hidden = inputs.attention_mask
        if hidden is None:
            hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        probabilities = torch.softmax(scores, dim=-1, dtype=wide).to(scores.dtype)
        keep = keep_mask(
            inputs.keys.whole,
            Site.ATTENTION_PROBABILITIES.of_layer(self.layer),
            heads * length,
            self.drop,
            first_column=self.first_head * length,
        )
        keep = keep.view(batch, length, heads, length).transpose(1, 2)
        return drop_probabilities(probabilities, keep, self.drop) @ value


def make_rotary(config: ModelConfig) -> Rotary | None:
    """The rotary embedding that the flags ask for, or None."""
    if config.position_embedding_type != "rope":
        return None
    return Rotary(
        dimensions=int(config.kv_channels * config.rotary_percent),
        base=config.rotary_base,
        interleaved=config.rotary_interleaved,
        interpolation=config.rotary_seq_len_interpolation_factor or 1.0,
    )
