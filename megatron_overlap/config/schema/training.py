"""The training run: batches, optimizer, precision, evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.config.kinds import DecayStyle, OptimizerKind
from megatron_overlap.config.options import (
    FRACTION,
    PROBABILITY,
    Limit,
    above,
    at_least,
    not_available,
    option,
    required,
    resolved,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Batches, duration and ends of a run."""

    micro_batch_size: int = required("Samples of a microbatch.", limit=at_least(1))
    global_batch_size: int = resolved("Samples of a step; micro-batch size x DP.", limit=at_least(1))
    train_iters: int = required("Steps of the whole run.", limit=at_least(1))
    seed: int = option(1234, "Seed of weights, dropout masks and data order.", limit=Limit(at_least=1, below=2**32))
    deterministic_mode: bool = option(False, "Sum in rank order and use deterministic kernels only.")
    check_for_nan_in_loss_and_grad: bool = option(True, "Stop when the loss or a gradient is not finite.")
    exit_interval: int | None = option(None, "Save and exit at multiples of this.", limit=at_least(1))
    exit_duration_in_mins: int | None = option(None, "Save and exit after this time.", limit=at_least(0))
    exit_signal_handler: bool = option(False, "Save and exit after SIGTERM on any rank.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning rate."""

    optimizer: OptimizerKind = option(
        OptimizerKind.ADAM,
        "Update rule.",
        refused=not_available(("sgd", "muon"), "adam") | {"ademamix": "belongs to a fork of Megatron; use adam"},
    )
    lr: float = required("Largest learning rate.", limit=at_least(0))
    min_lr: float = option(0.0, "Smallest learning rate after the warm-up.", limit=at_least(0))
    lr_decay_style: DecayStyle = option(
        DecayStyle.LINEAR,
        "Shape of the decay.",
        refused=not_available(("inverse-square-root", "WSD"), "constant, linear or cosine"),
    )
    lr_decay_iters: int = resolved("Steps until the smallest rate is reached; --train-iters.", limit=at_least(1))
    lr_warmup_iters: int = option(0, "Steps of the warm-up.", limit=at_least(0))
    lr_warmup_fraction: float | None = option(None, "Part of the decay steps that is warm-up.", limit=FRACTION)
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.", limit=at_least(0))
    weight_decay: float = option(0.01, "Decay of the weight matrices.", limit=at_least(0))
    clip_grad: float = option(1.0, "Largest norm of the whole gradient; 0 does not clip.", limit=at_least(0))
    adam_beta1: float = option(0.9, "Decay of the first moment.", limit=PROBABILITY)
    adam_beta2: float = option(0.999, "Decay of the second moment.", limit=PROBABILITY)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", limit=above(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats; float32 unless asked otherwise."""

    bf16: bool = option(False, "Compute in bfloat16, with float32 main parameters and gradients.")
    fp64: bool = option(False, "Compute in double precision, for comparisons.")
    grad_reduce_in_bf16: bool = option(False, "Keep and reduce gradients in bfloat16.")

    @property
    def params_dtype(self) -> str:
        """Return torch's name of the format that the model computes in."""
        if self.fp64:
            return "float64"
        return "bfloat16" if self.bf16 else "float32"

    @property
    def main_dtype(self) -> str:
        """Return torch's name of the format that the optimizer computes in."""
        return "float64" if self.fp64 else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Loss on the validation and test sets."""

    eval_interval: int = option(1000, "Steps between evaluations.", limit=at_least(1))
    eval_iters: int = option(100, "Steps of an evaluation; 0 or less evaluates never.")
