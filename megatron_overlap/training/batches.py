"""Which microbatch a stage of this rank sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_overlap.pipeline_parallel import Batch


@dataclass(frozen=True)
class BatchShape:
    """Samples of a microbatch, tokens of a sample, this replica among `dp_size`, and where tensors live."""

    micro_batch_size: int
    sequence_length: int
    dp_rank: int
    dp_size: int
    device: torch.device


class StepBatches:
    """The microbatches of one step: read in order, once, and shared by the stages of this rank.

    `stream` is None on a rank whose stages read nothing: its batches hold positions and sample numbers only, which
    follow from `first_sample`, the global number of the step's first sample.
    """

    def __init__(self, stream: Iterator[Batch] | None, shape: BatchShape, first_sample: int) -> None:
        self._stream = stream
        self._shape = shape
        self._first_sample = first_sample
        self._read: list[Batch] = []

    def __call__(self, stage: int, microbatch: int) -> Batch:
        while len(self._read) <= microbatch:
            self._read.append(self._next())
        return self._read[microbatch]

    def _next(self) -> Batch:
        shape = self._shape
        if self._stream is not None:
            return {name: tensor.to(shape.device, non_blocking=True) for name, tensor in next(self._stream).items()}
        place = (len(self._read) * shape.dp_size + shape.dp_rank) * shape.micro_batch_size
        samples = torch.arange(shape.micro_batch_size, device=shape.device) + (self._first_sample + place)
        positions = torch.arange(shape.sequence_length, device=shape.device)
        return {"sample_ids": samples, "position_ids": positions.expand(shape.micro_batch_size, -1)}
