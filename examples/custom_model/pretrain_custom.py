"""Train your own model on your own data with your own loss: here, a small net that continues noisy waves.

Run it alone, or with any layout:

    python examples/custom_model/pretrain_custom.py
    torchrun --nproc-per-node 4 examples/custom_model/pretrain_custom.py \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --noise 0.2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatron_overlap.config import Config
from megatron_overlap.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_overlap.tensor_parallel.random import normal
from megatron_overlap.training import StageContext, main

Batch = Mapping[str, torch.Tensor]
KERNEL = 9  # steps that a layer looks back

DEFAULTS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,  # no layer here has heads, but the checks of the flags want some
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "train_iters": 40,
    "lr": 3e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "eval_iters": 2,
    "log_interval": 5,
    "num_workers": 0,
    "distributed_backend": "gloo",
}


class Waves(torch.utils.data.Dataset[dict[str, NDArray[np.float32]]]):
    """Sine waves of random period and phase: noisy values as input, the clean next value as target."""

    def __init__(self, num_samples: int, length: int, *, noise: float, seed: int) -> None:
        self.num_samples, self.length, self.noise, self.seed = num_samples, length, noise, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[np.float32]]:
        # A sample is a function of its number, so that any rank and a resumed run see the same one.
        random = np.random.default_rng((self.seed, index))
        period, phase = random.uniform(8, 24), random.uniform(0, 2 * np.pi)
        wave = np.sin(2 * np.pi * np.arange(self.length + 1) / period + phase).astype(np.float32)
        noise = self.noise * random.standard_normal(self.length, dtype=np.float32)
        return {"series": wave[:-1] + noise, "target": wave[1:]}


def waves(config: Config, tokenizer: Any, num_samples: tuple[int | None, ...]) -> tuple[Waves, ...]:
    """Training, validation and test set; they differ in their seeds."""
    noise, length = config.extra["noise"], config.model.seq_length
    return tuple(
        Waves(wanted or 0, length, noise=noise, seed=config.training.seed + split)
        for split, wanted in enumerate(num_samples)
    )


class Layer(nn.Module):
    """A causal convolution over time, then an MLP cut over the tensor-parallel ranks. `[b, s, h]` to the same."""

    def __init__(self, context: StageContext, number: int) -> None:
        super().__init__()
        # By the layer's number: the same start at any layout.
        torch.manual_seed(context.config.training.seed + number)
        hidden = context.config.model.hidden_size
        fill = normal(context.config.training.seed, 0.05)
        # Plain torch modules are whole on every tensor-parallel rank.
        self.mix = nn.Conv1d(hidden, hidden, KERNEL, groups=hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, context.layer_context, fill=fill, name="up")
        self.down = RowParallelLinear(4 * hidden, hidden, context.layer_context, fill=fill, name="down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = nn.functional.pad(x.transpose(1, 2), (KERNEL - 1, 0))
        x = x + self.mix(past).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class WaveStage(nn.Module):
    """The layers of a pipeline stage: the first reads values, rows `[b * s, h]` pass on, the last gives predictions.

    Parameters have the same names at any layout, since a layer is named by its number in the whole model: this is
    what lets a checkpoint load at another layout.
    """

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        model = context.config.model
        if context.config.parallel.sequence_parallel:
            raise ValueError("--sequence-parallel: this model mixes positions and needs whole sequences")
        self.shape = (-1, model.seq_length, model.hidden_size)
        torch.manual_seed(context.config.training.seed)
        self.enter = nn.Linear(1, model.hidden_size) if context.is_first else None
        self.layers = nn.ModuleDict({str(number): Layer(context, number) for number in context.layers})
        self.leave = nn.Linear(model.hidden_size, 1) if context.is_last else None

    def forward(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        if self.enter is not None:
            rows = self.enter(batch["series"].unsqueeze(-1))
        assert rows is not None
        x = rows.view(self.shape)
        for layer in self.layers.values():
            x = layer(x)
        return x.flatten(0, 1) if self.leave is None else self.leave(x).squeeze(-1)


def squared_error(batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the loss, number of values it is averaged over, and what else to log, averaged over microbatches."""
    error = output - batch["target"]
    return error.square().sum(), torch.tensor(float(error.numel())), {"absolute error": error.abs().mean()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation of the noise on the input")


def train(argv: Sequence[str] | None = None) -> int:
    """Train and give the exit status; `pretrain` takes the same arguments and raises instead."""
    return main(
        argv,
        datasets_provider=waves,
        model_provider=WaveStage,
        loss_func=squared_error,
        extra_args=add_arguments,
        defaults=DEFAULTS,
    )


if __name__ == "__main__":
    raise SystemExit(train())
