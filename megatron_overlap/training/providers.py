"""The model, loss and data of `pretrain`, each replaceable by the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_overlap.comm import Channels
from megatron_overlap.config import Config
from megatron_overlap.model import GPTStage, StagePart, Vocabulary
from megatron_overlap.pipeline_parallel import Batch, LossFunc
from megatron_overlap.tensor_parallel import LayerContext


@dataclass(frozen=True)
class StageContext:
    """What a model provider needs to build one pipeline stage.

    `layers`: global numbers of the layers of this stage. `layer_context` goes to the tensor-parallel layers.
    """

    config: Config
    channels: Channels
    stage: int
    layers: range
    is_first: bool
    is_last: bool
    vocab_size: int
    padded_vocab_size: int
    layer_context: LayerContext


ModelProvider = Callable[[StageContext], nn.Module]
DatasetsProvider = Callable[[Config, Any, tuple[int | None, int | None, int | None]], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Providers:
    """What `pretrain` trains. `datasets` None: the token files that the flags name."""

    model: ModelProvider
    loss: LossFunc
    datasets: DatasetsProvider | None


def gpt_stage(context: StageContext) -> nn.Module:
    """A stage of the GPT that the flags describe."""
    return GPTStage(
        context.config.model,
        StagePart(context.layers, context.is_first, context.is_last),
        Vocabulary(context.vocab_size, context.padded_vocab_size),
        context.config.training.seed,
        context.layer_context,
    )


def masked_lm_loss(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the `[b, s]` losses where the mask is 1, and how many there are."""
    mask = batch["loss_mask"]
    return (losses * mask).sum(), mask.sum(), {}
