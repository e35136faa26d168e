"""What a channel records: an operation until its completion, a wait for as long as it lasted."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_overlap.comm import Channel, Pending
from megatron_overlap.timeline.exposure import KindSummary, summarize
from megatron_overlap.timeline.spans import Lane, MessageKey, Recorder, Recording, Span
from tests.comm.opened import open_channel, value_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

DELAY_S = 0.05
NUM_BYTES = 4 * 3


def _until_complete(recorder: Recorder) -> Recording:
    """Take once an operation has ended by itself."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        recording = recorder.take()
        if recording.operations:
            return recording
        time.sleep(0.001)
    raise AssertionError("no operation ended")


def check_late_wait() -> None:
    recorder = Recorder(enabled=True)
    channel = open_channel(recorder=recorder)
    pending = channel.all_reduce(value_of(channel.rank, 3), "grads")
    issued = time.perf_counter()
    ended = _until_complete(recorder)
    (operation,) = ended.operations
    assert (operation.lane, operation.name, operation.num_bytes) == (Lane.TP, "grads", NUM_BYTES)
    assert operation.start <= issued < operation.end
    assert operation.duration >= 0.9 * DELAY_S
    assert ended.waits == ()
    pending.wait()
    waited = recorder.take()
    assert waited.operations == ()
    (wait,) = waited.waits
    assert (wait.lane, wait.name) == (Lane.TP, "grads")
    assert wait.start > operation.end
    hidden = summarize(ended)[Lane.TP]
    assert (hidden.calls, hidden.num_bytes, hidden.exposed_ms) == (1, NUM_BYTES, 0)


def test_an_operation_ends_when_it_completes_however_late_its_wait() -> None:
    run_ranks(2, check_late_wait, shim=f"delay:{DELAY_S}")


def check_exposed(blocking: bool) -> KindSummary:
    recorder = Recorder(enabled=True)
    channel = open_channel(recorder=recorder, blocking=blocking, lane=Lane.DP)
    pending = channel.all_reduce(value_of(channel.rank, 3), "grads")
    if not blocking:
        pending.wait()
    recording = recorder.take()
    assert [span.name for span in (*recording.operations, *recording.waits)] == ["grads", "grads"]
    if blocking:
        pending.wait()
        assert recorder.take() == Recording()
    return summarize(recording)[Lane.DP]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_wait_at_once_exposes_the_operation(blocking: bool) -> None:
    for summary in run_ranks(2, check_exposed, (blocking,), shim=f"delay:{DELAY_S}"):
        assert (summary.calls, summary.num_bytes) == (1, NUM_BYTES)
        assert summary.busy_ms >= 900 * DELAY_S
        assert summary.exposed_ms >= 900 * DELAY_S
        assert summary.exposed_ms == pytest.approx(summary.busy_ms, abs=400 * DELAY_S)


def check_every_kind(enabled: bool) -> list[Span]:
    recorder = Recorder(enabled=enabled)
    channel = open_channel(recorder=recorder)
    own = value_of(channel.rank, channel.size)
    for pending in _one_of_each(channel, own):
        pending.wait()
    recording = recorder.take()
    assert sorted(span.name for span in recording.waits) == sorted(span.name for span in recording.operations)
    return sorted(recording.operations, key=lambda span: span.start)


def _one_of_each(channel: Channel, own: torch.Tensor) -> list[Pending]:
    other = 1 - channel.rank
    return [
        channel.all_reduce(own.clone(), "sum"),
        channel.all_gather(own.clone(), "gather"),
        channel.reduce_scatter(own.clone(), "scatter"),
        channel.broadcast(own.clone(), 0, "broadcast"),
        channel.send(own.clone(), other, 3, "send", MessageKey("F", channel.rank, 3)),
        channel.recv(torch.empty_like(own), other, 3, "receive", MessageKey("F", other, 3)),
    ]


def test_every_kind_of_operation_is_recorded_once() -> None:
    for rank, spans in enumerate(run_ranks(2, check_every_kind, (True,))):
        assert [(span.name, span.num_bytes, span.key) for span in spans] == [
            ("sum", 8, None),
            ("gather", 8, None),
            ("scatter", 4, None),
            ("broadcast", 8 * (rank == 0), None),
            ("send", 8, MessageKey("F", rank, 3)),
            ("receive", 0, MessageKey("F", 1 - rank, 3)),
        ]


def test_nothing_is_recorded_while_recording_is_off() -> None:
    assert run_ranks(2, check_every_kind, (False,)) == [[], []]
