"""Linear layers, embedding and cross entropy cut over the tensor-parallel group."""

from megatron_overlap.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_overlap.tensor_parallel.embedding import VocabParallelEmbedding
from megatron_overlap.tensor_parallel.layers import ColumnParallelLinear, LayerContext, RowParallelLinear
from megatron_overlap.tensor_parallel.parameter import (
    NamedSlice,
    ParameterInfo,
    Partition,
    Piece,
    info_of,
    name_parameters,
)

__all__ = [
    "ColumnParallelLinear",
    "LayerContext",
    "NamedSlice",
    "ParameterInfo",
    "Partition",
    "Piece",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "info_of",
    "name_parameters",
    "vocab_parallel_cross_entropy",
]
