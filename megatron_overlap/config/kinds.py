"""Kinds that a flag chooses between; each member equals its command-line word."""

from __future__ import annotations

from enum import StrEnum


class PositionEmbedding(StrEnum):
    """How a token learns its position."""

    LEARNED_ABSOLUTE = "learned_absolute"
    ROPE = "rope"
    NONE = "none"


class Normalization(StrEnum):
    """Norm in front of attention, MLP and output layer."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"


class TpOverlapMode(StrEnum):
    """What breaks the dependency between a tensor-parallel collective and its neighbours."""

    AUTO = "auto"
    NONE = "none"
    BACKWARD = "backward"
    CHUNK = "chunk"
    SPLIT = "split"


class PipelineWarmup(StrEnum):
    """Number of forwards before the first backward."""

    AUTO = "auto"
    PLAIN = "plain"
    EAGER = "eager"


class PipelineSchedule(StrEnum):
    """Order of a rank's forwards and backwards."""

    AUTO = "auto"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"


class GradReduce(StrEnum):
    """When a stage's gradients are reduced over the replicas."""

    AUTO = "auto"
    SYNC = "sync"
    EAGER = "eager"
    SHIFTED = "shifted"
    HYBRID = "hybrid"


class DistributedBackend(StrEnum):
    """Library below torch.distributed."""

    NCCL = "nccl"
    GLOO = "gloo"


class OptimizerKind(StrEnum):
    """Update rule; adam is AdamW."""

    ADAM = "adam"


class DecayStyle(StrEnum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class DataloaderKind(StrEnum):
    """Order in which samples are read."""

    SINGLE = "single"
    CYCLIC = "cyclic"


class TokenizerKind(StrEnum):
    """Tokenizer classes by Megatron's names."""

    GPT2_BPE = "GPT2BPETokenizer"
    HUGGING_FACE = "HuggingFaceTokenizer"
    NULL = "NullTokenizer"
