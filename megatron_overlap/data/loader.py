"""Microbatches of one replica as CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_overlap.data.sample import Sample, SampleSource
from megatron_overlap.data.sampler import Numbered, StreamPosition, cyclic_batches, sequential_batches

_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends

Microbatch = dict[str, torch.Tensor]
# By the values of --dataloader-type.
BATCHES = {"single": sequential_batches, "cyclic": cyclic_batches}


def microbatch_loader(
    dataset: SampleSource,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
    dataloader_type: str = "single",
) -> Iterator[Microbatch]:
    """Yield this replica's microbatches from sample `consumed_samples` of the run on.

    Keys are those of the samples, with a batch dimension in front, and `sample_ids` int64 [b]: the number of each
    sample in the run, whatever the layout. Asking for more than there is raises ValueError.
    """
    position = StreamPosition(len(dataset), consumed_samples, micro_batch_size, dp_rank, dp_size)
    loader = DataLoader(
        _NumberedSamples(dataset),
        batch_sampler=BATCHES[dataloader_type](position),
        num_workers=num_workers,
        # Workers share the mapped index files; other start methods would copy them.
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=partial(_die_with, os.getpid()) if num_workers else None,
        # The default would draw from torch's global generator.
        generator=torch.Generator(),
    )
    yield from loader
    raise ValueError(
        f"no samples left: the data set has {len(dataset)} samples, and after the {consumed_samples} of earlier steps "
        f"and those of this run fewer than --micro-batch-size {micro_batch_size} x {dp_size} replicas remain. Lower "
        "--train-iters or --eval-iters, add data, or give weights in --data-path (sets without weights are read once)"
    )


def _die_with(parent: int, worker: int) -> None:
    """End this loader process with its rank: it holds copies of the rank's sockets, which hide its end from others."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _NumberedSamples(Dataset[Sample]):
    """Adds the run-wide number, under which dropout masks are drawn, to each sample."""

    def __init__(self, dataset: SampleSource) -> None:
        self._dataset = dataset

    def __getitem__(self, numbered: Numbered) -> Sample:
        number, index = numbered
        return {**self._dataset[index], "sample_ids": np.asarray(number, dtype=np.int64)}
