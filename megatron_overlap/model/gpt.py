"""One pipeline stage of a GPT model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron_overlap.config import ModelConfig
from megatron_overlap.model.attention import make_rotary
from megatron_overlap.model.block import Block
from megatron_overlap.model.inputs import InputMaker, Inputs, own_rows
from megatron_overlap.model.norm import Norm
from megatron_overlap.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_overlap.tensor_parallel.dropout import Site, add_dropped
from megatron_overlap.tensor_parallel.embedding import VocabParallelEmbedding, embed
from megatron_overlap.tensor_parallel.layers import LayerContext
from megatron_overlap.tensor_parallel.linear import column_parallel_linear
from megatron_overlap.tensor_parallel.parameter import Partition, partition_of
from megatron_overlap.tensor_parallel.random import normal


@dataclass(frozen=True)
class StagePart:
    """Which part of the model a stage holds: its layers (global numbers), and whether it is first and last."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Vocabulary:
    """True size, and size with padding that every tensor-parallel rank shares equally."""

    size: int
    padded: int


class Embedding(nn.Module):
    """Token and, where learned, position embeddings: `[b, s]` ids -> `[n, h]` rows (sequence parallel: `[n/t, h]`)."""

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary, seed: int, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.drop = config.hidden_dropout
        fill = normal(seed, config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            vocabulary.padded, vocabulary.size, config.hidden_size, context, fill=fill
        )
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, context, normal(seed, config.init_method_std)
            )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        rows = self.word_embeddings(tokens.flatten())
        if self.position_embeddings is not None:
            ids = positions.flatten()
            rows = rows + self.position_embeddings(
                own_rows(ids, self.context.tp) if self.context.sequence_parallel else ids
            )
        if self.drop == 0 or inputs.keys is None:
            return rows
        return add_dropped(rows, None, inputs.keys.rows, Site.EMBEDDING.of_layer(0), self.drop)


class PositionEmbedding(nn.Module):
    """`[n]` positions -> `[n, h]`, the table whole on every tensor-parallel rank."""

    def __init__(self, num_positions: int, hidden_size: int, context: LayerContext, fill: object) -> None:
        super().__init__()
        self.weight = context.empty(num_positions, hidden_size)
        self.weight.partition = Partition(  # type: ignore[attr-defined]
            (num_positions, hidden_size),
            partial_grad=context.sequence_parallel,
            fill=fill,  # type: ignore[arg-type]
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return embed(positions, self.weight)


class OutputLayer(nn.Module):
    """The output projection's own weight `[Vp/t, h]`; on the last of several stages it may be the tied copy."""

    def __init__(
        self, config: ModelConfig, vocabulary: Vocabulary, seed: int, context: LayerContext, *, tied_copy: bool
    ) -> None:
        super().__init__()
        tp = context.tp
        self.weight = context.empty(vocabulary.padded // tp.size, config.hidden_size)
        self.weight.partition = Partition(  # type: ignore[attr-defined]
            (vocabulary.padded, config.hidden_size),
            dim=0,
            index=tp.rank,
            count=tp.size,
            valid=vocabulary.size,
            shared_copy=tied_copy,
            tied=tied_copy,
            stands_for=("output_layer.weight", "embedding.word_embeddings.weight") if tied_copy else None,
            fill=normal(seed, config.init_method_std),
        )


class Decoder(nn.Module):
    """The stage's blocks under their global numbers, and the final norm on the last stage."""

    def __init__(self, config: ModelConfig, part: StagePart, seed: int, context: LayerContext) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block(config, layer, seed, context) for layer in part.layers})
        self.final_layernorm = (
            Norm(config.normalization, config.hidden_size, config.norm_epsilon, context) if part.is_last else None
        )

    def forward(self, rows: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        for block in self.layers.values():
            rows = block(rows, inputs)
        return rows if self.final_layernorm is None else self.final_layernorm(rows)


class GPTStage(nn.Module):
    """`forward(batch, rows)`: the first stage reads `batch["tokens"]`, the others the rows of the stage before.

    Gives rows `[n, h]` (sequence parallel: `[n/t, h]`); on the last stage losses `[b, s]` in fp32 where the batch has
    `labels`, and otherwise this rank's logits `[n, Vp/t]`.
    """

    def __init__(
        self, config: ModelConfig, part: StagePart, vocabulary: Vocabulary, seed: int, context: LayerContext
    ) -> None:
        super().__init__()
        self.context, self.vocabulary = context, vocabulary
        tied = not config.untie_embeddings_and_output_weights
        self.embedding = Embedding(config, vocabulary, seed, context) if part.is_first else None
        if tied and self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
            weight.partition = replace(  # type: ignore[attr-defined]
                partition_of(weight), uses=2 if part.is_last else 1, tied=not part.is_last
            )
        self.decoder = Decoder(config, part, seed, context)
        self.is_last = part.is_last
        own_output = part.is_last and not (tied and part.is_first)
        self.output_layer = OutputLayer(config, vocabulary, seed, context, tied_copy=tied) if own_output else None
        drops = config.hidden_dropout > 0 or config.attention_dropout > 0
        self.make_inputs = InputMaker(
            context.tp, context.sequence_parallel, make_rotary(config), context.dtype, seed if drops else None
        )

    @property
    def output_weight(self) -> torch.Tensor:
        """The output projection, which may be the embedding itself."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def forward(self, batch: Mapping[str, torch.Tensor], rows: torch.Tensor | None = None) -> torch.Tensor:
        inputs = self.make_inputs(batch, training=self.training)
        if self.embedding is not None:
            rows = self.embedding(batch["tokens"], batch["position_ids"], inputs)
        assert rows is not None, "a stage after the first needs the rows of the stage before"
        rows = self.decoder(rows, inputs)
        if not self.is_last:
            return rows
        context = self.context
        logits = column_parallel_linear(
            rows, self.output_weight, None, context.tp, sequence_parallel=context.sequence_parallel, name="output"
        )
        if "labels" not in batch:
            return logits
        labels = batch["labels"]
        losses = vocab_parallel_cross_entropy(logits, labels.flatten(), context.tp, self.vocabulary.size)
        return losses.view_as(labels)
