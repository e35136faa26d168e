"""The whole configuration: a field is a line and a sentence, and its flag follows from it.

A value in a `Config` is final: nothing is left to be derived, and no kind is left at `auto`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.options import Option, option_of
from megatron_overlap.config.schema.files import CheckpointConfig, DataConfig, LoggingConfig
from megatron_overlap.config.schema.model import ModelConfig
from megatron_overlap.config.schema.parallel import OverlapConfig, ParallelConfig
from megatron_overlap.config.schema.training import EvaluationConfig, OptimizerConfig, PrecisionConfig, TrainingConfig

__all__ = [
    "GROUPS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainingConfig",
    "all_fields",
    "bare_type",
    "typed_value",
]

GROUPS: Mapping[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "overlap": OverlapConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "evaluation": EvaluationConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig
    parallel: ParallelConfig
    overlap: OverlapConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    evaluation: EvaluationConfig
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # the user's own arguments

    @property
    def num_microbatches(self) -> int:
        """Return the microbatches of a step on each replica."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.data_parallel_size)

    @property
    def train_samples(self) -> int:
        """Return the training samples of the whole run."""
        return self.training.train_iters * self.training.global_batch_size

    @property
    def valid_samples(self) -> int:
        """Return the validation samples of the whole run, the final evaluation included."""
        evaluations = self.training.train_iters // self.evaluation.eval_interval + 1
        return evaluations * self.evaluation.eval_iters * self.training.global_batch_size

    @property
    def test_samples(self) -> int:
        """Return the samples of the final test."""
        return self.evaluation.eval_iters * self.training.global_batch_size

    @property
    def lr_decay_samples(self) -> int:
        """Return the length of the learning rate schedule in samples."""
        return self.optimizer.lr_decay_iters * self.training.global_batch_size

    @property
    def lr_warmup_samples(self) -> float:
        """Return the length of the warm-up in samples, not rounded when it is given as a fraction."""
        if self.optimizer.lr_warmup_fraction is not None:
            return self.optimizer.lr_warmup_fraction * self.lr_decay_samples
        return self.optimizer.lr_warmup_iters * self.training.global_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values that JSON can hold; "derived" is for readers and not read back."""
        groups: dict[str, Any] = {name: _plain(dataclasses.asdict(getattr(self, name))) for name in GROUPS}
        groups["extra"] = dict(self.extra)
        groups["derived"] = {
            "data_parallel_size": self.parallel.data_parallel_size,
            "num_microbatches": self.num_microbatches,
            "params_dtype": self.precision.params_dtype,
        }
        return groups

    @classmethod
    def from_dict(cls, groups: Mapping[str, Any]) -> Config:
        """Rebuild what `to_dict` wrote; settings that it lacks take their defaults."""
        unknown = [name for name in groups if name not in (*GROUPS, "extra", "derived")]
        problems = [f"unknown group of settings {name!r}; known are {', '.join(GROUPS)}" for name in unknown]
        built = {}
        for name, group in GROUPS.items():
            try:
                built[name] = group(**_typed(group, groups.get(name, {})))
            except (TypeError, ValueError) as error:
                problems.append(f"settings of group {name!r}: {error}")
        if problems:
            raise ConfigError(problems)
        return cls(**built, extra=dict(groups.get("extra", {})))


@functools.cache
def all_fields() -> tuple[tuple[str, str, Any, Option], ...]:
    """Return group name, field name, type and declaration of every field."""
    hints = {name: typing.get_type_hints(group) for name, group in GROUPS.items()}
    return tuple(
        (group_name, field.name, hints[group_name][field.name], option_of(field))
        for group_name, group in GROUPS.items()
        for field in dataclasses.fields(group)
    )


def bare_type(hint: Any) -> Any:
    """Return the type of a value that is given: `int` for `int | None`."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    is_union = type(None) in typing.get_args(hint)
    return members[0] if is_union else hint


def typed_value(hint: Any, value: Any) -> Any:
    """Return a plain value as the field's type has it: words become kinds, lists become tuples."""
    if isinstance(value, list):
        return tuple(value)
    kind = bare_type(hint)
    return kind(value) if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, str) else value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in values.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, str) else value


def _typed(group: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(group)
    return {name: typed_value(hints.get(name), value) for name, value in values.items()}
