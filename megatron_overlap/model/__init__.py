"""Attention, MLP, block and the GPT stage."""

from megatron_overlap.model.gpt import GPTStage, StagePart, Vocabulary
from megatron_overlap.model.initialize import initialize_parameters

__all__ = ["GPTStage", "StagePart", "Vocabulary", "initialize_parameters"]
