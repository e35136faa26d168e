"""Training by the formulas: AdamW, gradient clipping, learning rate schedules and the averaging of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tests.oracle.gpt import Shape, Weights, token_losses


@dataclass(frozen=True)
class Microbatch:
    """`[b, s]` each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True)
class Options:
    """Lengths of the learning rate schedule are in samples."""

    lr: float
    min_lr: float = 0.0
    decay_style: str = "constant"
    decay_samples: int = 0
    warmup_samples: int = 0
    warmup_init: float = 0.0
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass
class History:
    """One entry per iteration, and the weights after the last one."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)


def train(shape: Shape, weights: Weights, batches: Iterable[Sequence[Microbatch]], options: Options) -> History:
    """One iteration per entry of `batches`, which holds all microbatches of all replicas."""
    weights = {name: value.clone() for name, value in weights.items()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    history, samples = History(), 0
    for step, microbatches in enumerate(batches, start=1):
        loss, gradients = loss_and_gradients(shape, weights, microbatches)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        shrink = min(1.0, options.clip_grad / (norm + 1e-6)) if options.clip_grad else 1.0
        lr = learning_rate(options, samples)
        for name, value in weights.items():
            gradient = gradients[name] * shrink
            first[name] = options.beta1 * first[name] + (1 - options.beta1) * gradient
            second[name] = options.beta2 * second[name] + (1 - options.beta2) * gradient**2
            mean = first[name] / (1 - options.beta1**step)
            variance = second[name] / (1 - options.beta2**step)
            decay = options.weight_decay if value.dim() > 1 else 0.0
            weights[name] = value - lr * decay * value - lr * mean / (variance.sqrt() + options.eps)
        samples += sum(len(microbatch.tokens) for microbatch in microbatches)
        history.losses.append(loss)
        history.grad_norms.append(norm)
        history.learning_rates.append(lr)
    history.weights = weights
    return history


def loss_and_gradients(
    shape: Shape, weights: Weights, microbatches: Sequence[Microbatch]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The reported loss weighs tokens equally, the gradient weighs microbatches equally."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    total, count = 0.0, 0.0
    for microbatch in microbatches:
        losses = token_losses(shape, leaves, microbatch.tokens, microbatch.labels) * microbatch.loss_mask
        tokens = float(microbatch.loss_mask.sum())
        (losses.sum() / max(tokens, 1.0) / len(microbatches)).backward()
        total += float(losses.detach().double().sum())
        count += tokens
    return total / max(count, 1.0), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def learning_rate(options: Options, samples: int) -> float:
    """The rate of the step that starts after `samples`."""
    warmup, decay = options.warmup_samples, options.decay_samples
    if warmup and samples <= warmup:
        return options.warmup_init + (options.lr - options.warmup_init) * samples / warmup
    if options.decay_style == "constant":
        return options.lr
    if samples > decay:
        return options.min_lr
    if options.decay_style == "inverse-square-root":
        return max(options.min_lr, options.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(samples, 1)))
    share = (samples - warmup) / (decay - warmup)
    coefficient = 1 - share if options.decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return options.min_lr + coefficient * (options.lr - options.min_lr)
