"""Microbatch forward and backward on one stage, and the executor of an action list."""

from megatron_overlap.pipeline_parallel.executor import Executor, Links, StepInputs
from megatron_overlap.pipeline_parallel.stage import Batch, LossFunc, MicrobatchLoss, Stage

__all__ = ["Batch", "Executor", "Links", "LossFunc", "MicrobatchLoss", "Stage", "StepInputs"]
