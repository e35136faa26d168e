"""Which samples a replica reads: sequential and cyclic, resumed anywhere, at any number of replicas."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.data.loader import microbatch_loader
from megatron_overlap.data.sample import Sample
from megatron_overlap.data.sampler import StreamPosition, cyclic_batches, sequential_batches


class Numbers:
    """Sample k holds the id k."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": np.full(3, index, dtype=np.int64), "loss_mask": np.ones(3, dtype=np.float32)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_sequential_reads_the_stream_in_order(total: int, consumed: int, micro: int, dp: int) -> None:
    by_rank = [list(sequential_batches(StreamPosition(total, consumed, micro, rank, dp))) for rank in range(dp)]
    expected = []
    start = consumed
    while start + micro * dp <= total:
        expected.append([list(range(start + rank * micro, start + (rank + 1) * micro)) for rank in range(dp)])
        start += micro * dp
    assert [[[index for _, index in batch] for batch in step] for step in zip(*by_rank, strict=True)] == expected
    assert all(number == index for batches in by_rank for batch in batches for number, index in batch)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.integers(0, 5))
def test_cyclic_permutes_each_replicas_part_and_resumes_exactly(micro: int, dp: int, more: int, skip: int) -> None:
    total = micro * dp + more
    active = total // (micro * dp) * micro * dp
    part = active // dp
    steps = 3 * active // (micro * dp)
    for rank in range(dp):
        whole = list(islice(cyclic_batches(StreamPosition(total, 0, micro, rank, dp)), steps))
        for epoch in range(3):
            order = torch.randperm(part, generator=torch.Generator().manual_seed(epoch)) + rank * part
            batches = whole[epoch * part // micro : (epoch + 1) * part // micro]
            assert [index for batch in batches for _, index in batch] == order.tolist()
        done = min(skip, steps)
        rest = cyclic_batches(StreamPosition(total, done * micro * dp, micro, rank, dp))
        assert list(islice(rest, steps - done)) == whole[done:]


def test_cyclic_refuses_what_it_cannot_resume() -> None:
    with pytest.raises(ValueError, match=r"after 3 samples, .* micro-steps of 4 samples"):
        next(cyclic_batches(StreamPosition(20, 3, 2, 0, 2)))
    with pytest.raises(ValueError, match=r"has 3 samples, one micro-step .* takes 4"):
        next(cyclic_batches(StreamPosition(3, 0, 2, 0, 2)))


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("stop", [0, 5])
def test_a_step_has_the_same_samples_at_any_layout(micro: int, dp: int, stop: int) -> None:
    global_batch = 8
    loaders = [
        microbatch_loader(Numbers(200), stop * global_batch, micro_batch_size=micro, dp_rank=rank, dp_size=dp)
        for rank in range(dp)
    ]
    for step in range(stop, 10):
        read: list[int] = []
        for _ in range(global_batch // (micro * dp)):
            for loader in loaders:
                batch = next(loader)
                assert batch["tokens"].shape == (micro, 3)
                assert torch.equal(batch["sample_ids"], batch["tokens"][:, 0])
                read += batch["sample_ids"].tolist()
        assert read == list(range(step * global_batch, (step + 1) * global_batch))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_tensors_and_draw_nothing_from_the_global_generator(num_workers: int) -> None:
    state = torch.get_rng_state()
    loader = microbatch_loader(Numbers(10), 4, micro_batch_size=2, dp_rank=1, dp_size=2, num_workers=num_workers)
    batch = next(loader)
    assert {key: value.dtype for key, value in batch.items()} == {
        "tokens": torch.int64,
        "loss_mask": torch.float32,
        "sample_ids": torch.int64,
    }
    assert batch["tokens"][:, 0].tolist() == [6, 7]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("consumed", [0, 6, 10, 100])
def test_running_past_the_end_names_the_flags(consumed: int) -> None:
    loader = microbatch_loader(Numbers(10), consumed, micro_batch_size=2, dp_rank=0, dp_size=2)
    for _ in range(max(0, 10 - consumed) // 4):
        next(loader)
    with pytest.raises(ValueError, match=r"no samples left: the data set has 10 samples.*--train-iters"):
        next(loader)
