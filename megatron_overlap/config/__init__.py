"""Settings of a run: frozen dataclasses, with flags generated from their fields.

    result = parse_config(sys.argv[1:], world_size=8)
    result.config        Config: groups of frozen values, everything resolved
    result.warnings      what does not act as the user may expect, one line each
    result.notes         what was filled in and is worth a line
    result.dump_config   whether --dump-config was given: print `config.to_dict()` as JSON and stop

Every problem of a command line is in the one `ConfigError` (`messages`) that `parse_config` raises.
"""

from __future__ import annotations

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.kinds import (
    DataloaderKind,
    DecayStyle,
    DistributedBackend,
    GradReduce,
    Normalization,
    OptimizerKind,
    PipelineSchedule,
    PipelineWarmup,
    PositionEmbedding,
    TokenizerKind,
    TpOverlapMode,
)
from megatron_overlap.config.parse import ParsedConfig, parse_config
from megatron_overlap.config.report import format_arguments
from megatron_overlap.config.resolve import padded_vocab_size
from megatron_overlap.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    OverlapConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataloaderKind",
    "DecayStyle",
    "DistributedBackend",
    "EvaluationConfig",
    "GradReduce",
    "LoggingConfig",
    "ModelConfig",
    "Normalization",
    "OptimizerConfig",
    "OptimizerKind",
    "OverlapConfig",
    "ParallelConfig",
    "ParsedConfig",
    "PipelineSchedule",
    "PipelineWarmup",
    "PositionEmbedding",
    "PrecisionConfig",
    "TokenizerKind",
    "TpOverlapMode",
    "TrainingConfig",
    "format_arguments",
    "padded_vocab_size",
    "parse_config",
]
