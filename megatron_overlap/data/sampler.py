"""Which samples a replica reads next: a function of how many the run has consumed, not of how it ran before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# (number of the sample in the run, index of the sample in the data set)
Numbered = tuple[int, int]


@dataclass(frozen=True)
class StreamPosition:
    """A place in the stream of samples, and the share of one replica of every micro-step from there on.

    A micro-step takes micro_batch_size * dp_size samples of the stream; replica d gets the d-th run of
    micro_batch_size of them. So the samples of a step are the same for any number of replicas.
    """

    num_samples: int
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def step(self) -> int:
        """Samples of all replicas together in one micro-step."""
        return self.micro_batch_size * self.dp_size

    def numbers(self, micro_step: int) -> range:
        """Run-wide numbers of this replica's samples in a micro-step."""
        first = self.consumed_samples + micro_step * self.step + self.dp_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


def sequential_batches(position: StreamPosition) -> Iterator[list[Numbered]]:
    """The data set in its own order, once; samples at the end that do not fill a micro-step are left out."""
    for micro_step in range((position.num_samples - position.consumed_samples) // position.step):
        yield [(number, number) for number in position.numbers(micro_step)]


def cyclic_batches(position: StreamPosition) -> Iterator[list[Numbered]]:
    """The data set again and again, in a new random order each time.

    Each replica permutes a contiguous part of its own, with the epoch's number as seed: the order depends on the
    number of replicas.
    """
    steps_per_epoch = position.num_samples // position.step
    if steps_per_epoch == 0:
        raise ValueError(
            f"--dataloader-type cyclic: the data set has {position.num_samples} samples, one micro-step of "
            f"--micro-batch-size {position.micro_batch_size} on {position.dp_size} replicas takes {position.step}"
        )
    part = steps_per_epoch * position.micro_batch_size
    epoch, within = divmod(position.consumed_samples, steps_per_epoch * position.step)
    if within % position.step:
        raise ValueError(
            f"--dataloader-type cyclic: cannot go on after {position.consumed_samples} samples, which are no whole "
            f"number of micro-steps of {position.step} samples; keep --micro-batch-size and the number of replicas"
        )
    done = within // position.dp_size
    micro_step = 0
    while True:
        order = torch.randperm(part, generator=torch.Generator().manual_seed(epoch)) + position.dp_rank * part
        for batch in order[done:].split(position.micro_batch_size):
            yield list(zip(position.numbers(micro_step), batch.tolist(), strict=True))
            micro_step += 1
        epoch, done = epoch + 1, 0
