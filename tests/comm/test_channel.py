"""Every operation of a channel against the same thing worked out locally."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.comm import Channel, Ledger, Pending
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.process_groups import Group
from tests import shims
from tests.comm.opened import lone_channel, open_channel, uneven_value_of, value_of
from tests.ranks import run_ranks

ranks = pytest.mark.ranks

Issue = Callable[[Channel, torch.Tensor], Pending]
Expect = Callable[[list[torch.Tensor], int], torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """How to issue it, the rows that each rank of a group gives, the result, and the multiple of them that it sends."""

    issue: Issue
    rows: Callable[[int], int]
    expect: Expect
    sent: Callable[[int], float]


def _sum(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).sum(0)


OPERATIONS = {
    "all_reduce": Operation(
        lambda channel, own: channel.all_reduce(own, "grads"),
        rows=lambda size: 5,
        expect=lambda values, rank: _sum(values),
        sent=lambda size: 2 * (size - 1) / size,
    ),
    "all_reduce max": Operation(
        lambda channel, own: channel.all_reduce(own, "peak", op="max"),
        rows=lambda size: 5,
        expect=lambda values, rank: torch.stack(values).amax(0),
        sent=lambda size: 2 * (size - 1) / size,
    ),
    "all_gather": Operation(
        lambda channel, own: channel.all_gather(own, "rows"),
        rows=lambda size: 3,
        expect=lambda values, rank: torch.cat(values),
        sent=lambda size: size - 1,
    ),
    "reduce_scatter": Operation(
        lambda channel, own: channel.reduce_scatter(own, "rows"),
        rows=lambda size: 3 * size,
        expect=lambda values, rank: _sum(values)[3 * rank : 3 * rank + 3],
        sent=lambda size: (size - 1) / size,
    ),
    "broadcast": Operation(
        lambda channel, own: channel.broadcast(own, channel.size - 1, "scalars"),
        rows=lambda size: 5,
        expect=lambda values, rank: values[-1],
        sent=lambda size: float(dist.get_rank() == size - 1),
    ),
}
TENSORS = (((), torch.float32), ((4,), torch.bfloat16), ((2, 3), torch.float64), ((4,), torch.int64))


def check_all_in_flight(blocking: bool, deterministic: bool) -> None:
    """Issue everything, then wait: in the order of issue and, where nothing is issued in a wait, in reverse."""
    ledger = Ledger()
    channel = open_channel(blocking=blocking, deterministic=deterministic, ledger=ledger)
    size, rank = channel.size, channel.rank
    cases = [(name, *tensor) for name in OPERATIONS for tensor in TENSORS]
    for step in (1,) if deterministic else (1, -1):
        issued = []
        for number, (name, tail, dtype) in enumerate(cases):
            operation = OPERATIONS[name]
            shape = (operation.rows(size), *tail)
            values = [value_of(size * number + each, *shape, dtype=dtype) for each in range(size)]
            pending = operation.issue(channel, values[rank].clone())
            assert pending.label.num_bytes == int(operation.sent(size) * values[0].nbytes), name
            issued.append((name, pending, operation.expect(values, rank)))
        assert_in_flight(ledger, 0 if blocking else len(cases))
        for name, pending, expected in issued[::step]:
            result = pending.wait()
            assert result.dtype == expected.dtype, name
            assert torch.equal(result, expected), name
        ledger.assert_empty()


def assert_in_flight(ledger: Ledger, number: int) -> None:
    if number:
        with pytest.raises(RuntimeError, match=f"^{number} operations were issued"):
            ledger.assert_empty()
    else:
        ledger.assert_empty()


@ranks
@pytest.mark.parametrize("shim", ["late", "freeze"])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("world", "deterministic"), [(2, False), (3, False), (4, False), (3, True), (4, True)])
def test_results_equal_the_local_ones(world: int, deterministic: bool, blocking: bool, shim: str) -> None:
    run_ranks(world, check_all_in_flight, (blocking, deterministic), shim=shim)


def check_in_place() -> None:
    channel = open_channel()
    for issue in (OPERATIONS["all_reduce"].issue, OPERATIONS["broadcast"].issue):
        own = value_of(channel.rank, 4)
        assert issue(channel, own).wait().data_ptr() == own.data_ptr()
    deterministic = open_channel(deterministic=True)
    own = value_of(channel.rank, 4)
    assert OPERATIONS["all_reduce"].issue(deterministic, own).wait().data_ptr() == own.data_ptr()


@ranks
def test_sums_and_broadcasts_are_in_place() -> None:
    run_ranks(3, check_in_place, shim="late")


def check_cuts(deterministic: bool) -> torch.Tensor:
    """A sum in pieces of any length has the bits of the whole one."""
    channel = open_channel(deterministic=deterministic)
    numel = 1001
    whole = channel.all_reduce(uneven_value_of(channel.rank, numel), "whole").wait()
    for length in (500, 333, 64, 31):
        own = uneven_value_of(channel.rank, numel)
        pieces = [channel.all_reduce(own[at : at + length], "piece") for at in range(0, numel, length)]
        for piece in pieces:
            piece.wait()
        assert torch.equal(own, whole), length
    return whole


@ranks
@pytest.mark.parametrize(("world", "deterministic"), [(2, False), (2, True), (3, True), (4, True)])
def test_a_deterministic_sum_does_not_depend_on_the_cut(world: int, deterministic: bool) -> None:
    results = run_ranks(world, check_cuts, (deterministic,), shim="late")
    in_rank_order = reduce(torch.add, [uneven_value_of(rank, 1001) for rank in range(world)])
    for result in results:
        assert torch.equal(result, in_rank_order)


def check_scattered_sum() -> list[tuple[str, int, bool]]:
    channel = open_channel()
    with shims.installed("count") as shim:
        channel.reduce_scatter(value_of(channel.rank, 4 * channel.size, 5), "rows").wait()
    return [(call.name, call.numel, call.is_async) for call in shim.calls]


@ranks
def test_a_scattered_sum_on_gloo_sends_each_part_once() -> None:
    assert run_ranks(4, check_scattered_sum) == [[("all_to_all_single", 80, True)]] * 4


def check_crossed_messages(num_messages: int) -> None:
    """Neighbours in a ring send in one order and receive in another; tags tell the messages apart."""
    ledger = Ledger()
    channel = open_channel(ledger=ledger, blocking=True)
    size, rank = channel.size, channel.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [channel.send(value_of(10 * rank + tag, 3, 2), right, tag, f"SF{tag}") for tag in range(num_messages)]
    buffers = {tag: torch.zeros(3, 2) for tag in reversed(range(num_messages))}
    receives = {tag: channel.recv(buffer, left, tag, f"RF{tag}") for tag, buffer in buffers.items()}
    assert_in_flight(ledger, 2 * num_messages)
    for tag in (*range(1, num_messages, 2), *range(0, num_messages, 2)):
        assert receives[tag].label.num_bytes == 0
        assert torch.equal(receives[tag].wait(), value_of(10 * left + tag, 3, 2))
        assert torch.equal(buffers[tag], value_of(10 * left + tag, 3, 2))
    for send in sends:
        assert send.label.num_bytes == 24
        send.wait()
    ledger.assert_empty()


@ranks
@pytest.mark.parametrize("shim", ["late", "freeze"])
@pytest.mark.parametrize("world", [2, 3])
def test_messages_are_told_apart_by_tags(world: int, shim: str) -> None:
    run_ranks(world, check_crossed_messages, (5,), shim=shim)


def check_barrier() -> tuple[float, float]:
    channel = open_channel()
    if channel.rank == 1:
        time.sleep(0.2)
    entered = time.monotonic()
    channel.barrier()
    return entered, time.monotonic()


@ranks
def test_nobody_leaves_a_barrier_before_all_are_there() -> None:
    times = run_ranks(3, check_barrier)
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


# In one process


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_group_of_one_gives_the_tensor_back(name: str) -> None:
    channel = lone_channel()
    own = value_of(0, 3, 2)
    pending = channel.broadcast(own, 0, name) if name == "broadcast" else OPERATIONS[name].issue(channel, own)
    assert pending.label.num_bytes == 0
    assert pending.wait() is own
    channel.barrier()


@pytest.mark.parametrize(
    ("issue", "message"),
    [
        (lambda channel: channel.all_reduce(torch.zeros(4, 6).t(), "grads"), "grads: .* contiguous"),
        (lambda channel: channel.all_gather(torch.zeros(4, 6)[:, 1:], "rows"), "rows: .* contiguous"),
        (lambda channel: channel.send(torch.zeros(4, 6)[:, 1:], 1, 0, "SF0.0"), "SF0.0: .* contiguous"),
        (lambda channel: channel.recv(torch.zeros(4, 6)[:, 1:], 1, 0, "RF0.0"), "RF0.0: .* contiguous"),
        (lambda channel: channel.reduce_scatter(torch.zeros(5, 2), "rows"), "rows: 5 rows over 2 ranks"),
    ],
)
def test_tensors_that_cannot_be_sent_are_named(issue: Callable[[Channel], Pending], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        issue(lone_channel(size=2))


@pytest.mark.parametrize(
    ("backend", "deterministic", "size", "expected"),
    [
        ("nccl", False, 4, "reduce_scatter_single"),
        ("nccl", True, 4, "all_to_all_single"),
        ("nccl", True, 2, "reduce_scatter_single"),
        ("gloo", False, 2, "all_to_all_single"),
    ],
)
def test_the_way_to_scatter_a_sum_follows_the_back_end(
    monkeypatch: pytest.MonkeyPatch, backend: str, deterministic: bool, size: int, expected: str
) -> None:
    calls: list[str] = []

    class Done:
        def wait(self) -> None:
            pass

    def call(name: str, *args: object, **kwargs: object) -> Done:
        calls.append(name)
        return Done()

    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single"):
        monkeypatch.setattr(dist, name, partial(call, name), raising=False)
    group = Group(tuple(range(size)), 0, backend)
    channel = Channel(group, Lane.TP, Ledger(), Recorder(), deterministic=deterministic)
    channel.reduce_scatter(torch.zeros(8), "rows").wait()
    assert calls == [expected]
