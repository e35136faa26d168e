from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_overlap.data.loader import microbatch_loader
from megatron_overlap.training.batches import BatchShape, StepBatches

LENGTH = 4
CPU = torch.device("cpu")


class Samples:
    """Sample i is four tokens i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.full(LENGTH, index), "position_ids": np.arange(LENGTH)}


def test_microbatches_are_read_once_in_order_and_shared_by_stages() -> None:
    read: list[int] = []

    def stream() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(10):
            read.append(number)
            yield {"tokens": torch.tensor([[number]])}

    batches = StepBatches(stream(), BatchShape(1, 1, 0, 1, CPU), first_sample=0)
    order = [(0, 0), (0, 1), (2, 0), (0, 3), (2, 1), (2, 2), (2, 3)]
    assert [int(batches(stage, microbatch)["tokens"]) for stage, microbatch in order] == [0, 1, 0, 3, 1, 2, 3]
    assert read == [0, 1, 2, 3]
    assert batches(0, 2) is batches(2, 2)


def test_the_next_step_goes_on_with_the_stream() -> None:
    stream = iter([{"tokens": torch.tensor([number])} for number in range(4)])
    shape = BatchShape(1, 1, 0, 1, CPU)
    for step in range(2):
        batches = StepBatches(stream, shape, first_sample=2 * step)
        assert [int(batches(0, microbatch)["tokens"]) for microbatch in range(2)] == [2 * step, 2 * step + 1]


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize(("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_a_rank_that_reads_nothing_numbers_samples_as_the_loader_does(
    micro_batch_size: int, dp_size: int, dataloader_type: str
) -> None:
    """Dropout masks hang on these numbers: they must not depend on where a layer is."""
    consumed = 6
    for dp_rank in range(dp_size):
        shape = BatchShape(micro_batch_size, LENGTH, dp_rank, dp_size, CPU)
        loader = microbatch_loader(
            Samples(),
            consumed,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            dataloader_type=dataloader_type,
        )
        with_data = StepBatches(iter(loader), shape, first_sample=consumed)
        without = StepBatches(None, shape, first_sample=consumed)
        for microbatch in (0, 2, 1):
            for name in ("sample_ids", "position_ids"):
                assert torch.equal(without(1, microbatch)[name], with_data(0, microbatch)[name]), name
        assert set(without(1, 0)) == {"sample_ids", "position_ids"}
