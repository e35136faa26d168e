"""Small GPT stages and batches for tests, and whole tensors put together from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_overlap.comm import Channel
from megatron_overlap.config import ModelConfig
from megatron_overlap.model import GPTStage, StagePart, Vocabulary, initialize_parameters
from megatron_overlap.tensor_parallel import LayerContext, Piece, info_of, name_parameters

VOCABULARY = Vocabulary(size=37, padded=40)
SEQUENCE_LENGTH = 12
SEED = 5
# What a rank holds of a model: pieces with their values, and which names are whole on every rank.
Parts = list[tuple[Piece, torch.Tensor]]


def model_config(**changes: Any) -> ModelConfig:
    """Three layers of four heads, without dropout."""
    settings: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "kv_channels": 6,
        "num_query_groups": 4,
        "seq_length": SEQUENCE_LENGTH,
        "max_position_embeddings": SEQUENCE_LENGTH + 3,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
    }
    return ModelConfig(**{**settings, **changes})


def make_stage(
    config: ModelConfig,
    channel: Channel,
    *,
    layers: range | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = SEED,
) -> GPTStage:
    """A stage of some layers (all of them when not given), named and with initial weights."""
    layers = range(config.num_layers) if layers is None else layers
    part = StagePart(layers, layers.start == 0, layers.stop == config.num_layers)
    stage = GPTStage(config, part, VOCABULARY, seed, LayerContext(channel, sequence_parallel, dtype))
    name_parameters(stage, tp_size=channel.size)
    initialize_parameters(stage)
    return stage


def make_batch(batch_size: int = 2, *, first_sample: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCABULARY.size, (batch_size, SEQUENCE_LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(SEQUENCE_LENGTH).expand(batch_size, -1),
        "sample_ids": torch.arange(batch_size) + first_sample,
    }


def document_mask(batch: dict[str, torch.Tensor], starts: Iterable[int]) -> torch.Tensor:
    """`[b, s, s]`, True where a query must not see a key: later, or of an earlier document."""
    documents = torch.zeros(SEQUENCE_LENGTH, dtype=torch.long)
    for start in starts:
        documents[start:] += 1
    hidden = (documents[:, None] != documents[None]) | torch.ones(len(documents), len(documents)).triu(1).bool()
    return hidden.expand(batch["tokens"].shape[0], -1, -1)


def losses_and_parts(stage: GPTStage, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Parts, Parts]:
    """Losses, weights and gradients of a backward from unequal weights for the tokens."""
    losses = stage(batch)
    losses.backward(torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype).view_as(losses))
    weights, grads = parts(stage, gradients=False), parts(stage, gradients=True)
    return losses.detach(), weights, grads


def parts(stage: GPTStage, *, gradients: bool) -> Parts:
    """The true rows of every piece; gradients that are partial over tp are summed."""
    found: Parts = []
    for param in stage.parameters():
        tensor = param.detach()
        if gradients:
            assert param.grad is not None
            tensor = param.grad
            if info_of(param).tp_partial_grad:
                tensor = stage.context.tp.all_reduce(tensor.clone(), "partial").wait()
        found += [
            (piece, tensor[piece.local_start : piece.local_start + piece.rows].clone())
            for piece in info_of(param).pieces
        ]
    return found


def assemble(parts_of_ranks: Iterable[Parts]) -> dict[str, torch.Tensor]:
    """Whole tensors by name; every element must be there, and be the same wherever it is there twice."""
    whole: dict[str, torch.Tensor] = {}
    for piece, tensor in (part for held in parts_of_ranks for part in held):
        target = whole.setdefault(piece.name, torch.full(piece.global_shape, float("nan"), dtype=tensor.dtype))
        place = tuple(slice(start, start + size) for start, size in zip(piece.offset, tensor.shape, strict=True))
        known = ~target[place].isnan()
        assert torch.equal(target[place][known], tensor[known]), f"{piece.name} differs between ranks"
        target[place] = tensor
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} has rows that no rank holds"
    return whole
