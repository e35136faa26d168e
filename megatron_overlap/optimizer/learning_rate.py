"""The learning rate as a function of consumed samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

Json = str | int | float | None


class DecayStyle(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQUARE_ROOT = "inverse-square-root"
    WSD = "WSD"


class WsdStyle(StrEnum):
    EXPONENTIAL = "exponential"
    LINEAR = "linear"
    COSINE = "cosine"
    MINUS_SQRT = "minus_sqrt"


# Which flag sets a field, for errors.
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "warmup_samples": "--lr-warmup-iters or --lr-warmup-fraction",
    "decay_samples": "--lr-decay-iters (default: --train-iters)",
    "style": "--lr-decay-style",
    "wsd_samples": "--lr-wsd-decay-iters",
    "wsd_style": "--lr-wsd-decay-style",
}
OVERRIDE_FLAG = "--override-opt_param-scheduler"
USE_CHECKPOINT_FLAG = "--use-checkpoint-opt_param-scheduler"


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from `init_lr` to `max_lr`, then a decay to `min_lr` that ends at `decay_samples`.

    Lengths are in samples. WSD stays at `max_lr` and decays over its last `wsd_samples` only.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_samples: float = 0
    decay_samples: int = 1
    style: DecayStyle = DecayStyle.LINEAR
    wsd_samples: int = 0
    wsd_style: WsdStyle = WsdStyle.EXPONENTIAL

    def at(self, samples: int) -> float:
        """The rate set after so many samples, which the next step uses."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * samples / self.warmup_samples
        if self.style is DecayStyle.CONSTANT:
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.style is DecayStyle.INVERSE_SQUARE_ROOT:
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_samples, 1) / max(samples, 1)))
        return self.min_lr + self._share(samples) * (self.max_lr - self.min_lr)

    def _share(self, samples: int) -> float:
        """How much of the way from the lowest to the highest rate is left."""
        if self.style is DecayStyle.WSD:
            start = self.decay_samples - self.wsd_samples
            return 1.0 if samples <= start else _wsd_share(self.wsd_style, (samples - start) / self.wsd_samples)
        done = (samples - self.warmup_samples) / max(self.decay_samples - self.warmup_samples, 1)
        return 1 - done if self.style is DecayStyle.LINEAR else _cosine(done)

    def state(self) -> dict[str, Json]:
        """What a checkpoint stores of the schedule."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Json]) -> LearningRate:
        values = {field.name: state[field.name] for field in fields(cls) if field.name in state}
        values["style"] = DecayStyle(str(values["style"]))
        values["wsd_style"] = WsdStyle(str(values.get("wsd_style", WsdStyle.EXPONENTIAL)))
        return cls(**values)  # type: ignore[arg-type]


def resume(
    ours: LearningRate, saved: Mapping[str, Json], *, override: bool = False, use_checkpoint: bool = False
) -> LearningRate:
    """The schedule to go on with: `ours` (from the flags) must agree with the checkpoint's unless one is chosen.

    ValueError with both values of every field that differs, and both flags that settle it.
    """
    if override:
        return ours
    theirs = LearningRate.from_state(saved)
    if use_checkpoint:
        return theirs
    differing = [
        f"{flag} is {_text(getattr(ours, name))} but the checkpoint has {_text(getattr(theirs, name))}"
        for name, flag in _FLAGS.items()
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        unit = " (lengths in samples)" if ours.decay_samples != theirs.decay_samples else ""
        raise ValueError(
            f"the learning rate schedule differs from the checkpoint's{unit}: {'; '.join(differing)}. "
            f"{OVERRIDE_FLAG} takes the values given now, {USE_CHECKPOINT_FLAG} those of the checkpoint"
        )
    return ours


def _wsd_share(style: WsdStyle, done: float) -> float:
    if style is WsdStyle.LINEAR:
        return 1 - done
    if style is WsdStyle.COSINE:
        return _cosine(done)
    if style is WsdStyle.MINUS_SQRT:
        return 1 - math.sqrt(done)
    return float(2 * 0.5**done - 1)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
