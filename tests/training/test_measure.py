"""Communication figures from known spans, on ranks whose clocks differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_overlap.comm import Channels, open_channels
from megatron_overlap.timeline.exposure import KindSummary
from megatron_overlap.timeline.spans import Lane, MessageKey, Recorder
from megatron_overlap.topology.grid import Grid
from megatron_overlap.topology.process_groups import make_process_groups
from megatron_overlap.training import measure
from tests.comm.opened import lone_channel, open_channel
from tests.ranks import run_ranks

ranks = pytest.mark.ranks
CLOCK_SHIFT_S = 1000.0


@contextmanager
def shifted_clock() -> Iterator[float]:
    """Rank r's clock is r * 1000 s ahead."""
    shift = dist.get_rank() * CLOCK_SHIFT_S
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + shift)
    with patch.object(measure, "time", clock):
        yield shift


def check_clock(slow_rank: int | None) -> float:
    channel = open_channel()
    if channel.rank == slow_rank:
        meet = channel.barrier

        def leave_late(name: str) -> None:
            meet(name)
            time.sleep(0.1)

        channel.barrier = leave_late
    with shifted_clock() as shift:
        return measure.clock_offset(channel) + shift


@ranks
@pytest.mark.parametrize("slow_rank", [None, 1])
def test_clocks_are_compared_within_half_a_round_trip(slow_rank: int | None) -> None:
    """Also where a rank is always late, so that it finds the first rank's reading there already."""
    errors = run_ranks(3, check_clock, (slow_rank,))
    assert errors[0] == 0
    assert max(map(abs, errors)) < 0.08


def test_one_rank_has_one_clock() -> None:
    assert measure.clock_offset(lone_channel()) == 0


def open_pipeline(pp: int) -> Channels:
    groups = make_process_groups(Grid(1, pp, 1), timedelta(seconds=30))
    return open_channels(groups, Recorder(enabled=True), overlap=True)


def record(recorder: Recorder, rank: int, shift: float) -> None:
    """One iteration: each of two ranks has a tp operation, sends a message and waits for the other's.

    Times are seconds after `shift`: both messages are sent at 2, and waited for from 1 to 4.
    """
    recorder.operation(Lane.TP, "dgrad", 100 * (rank + 1)).finish(shift + 1.0, start=shift + 0.5 * rank)
    keys = (MessageKey("F", 0, 1), MessageKey("B", 1, 2))
    sent, received = keys[rank], keys[1 - rank]
    recorder.operation(Lane.PP, "send", 64, key=sent).finish(shift + 2.5, start=shift + 2.0)
    recorder.operation(Lane.PP, "receive", 0, key=received).finish(shift + 4.0, start=shift)
    recorder.wait(Lane.PP, "receive", key=received).finish(shift + 4.0, start=shift + 1.0)


def check_meter(num_iterations: int) -> tuple[dict[Lane, KindSummary], dict[Lane, KindSummary]]:
    """Figures of some iterations, and of the none after them."""
    channels = open_pipeline(2)
    with shifted_clock() as shift:
        meter = measure.CommMeter(channels, num_stages=2, num_microbatches=3)
        for _ in range(num_iterations):
            record(channels.recorder, dist.get_rank(), shift)
            meter.end_iteration()
        figures = meter.take()
        nothing = meter.take()
    channels.ledger.assert_empty()
    return figures, nothing


@ranks
@pytest.mark.parametrize("num_iterations", [1, 3])
def test_figures_are_means_over_ranks_and_iterations(num_iterations: int) -> None:
    results = run_ranks(2, check_meter, (num_iterations,), shim="late+freeze")
    assert results[0] == results[1]
    figures, nothing = results[0]
    assert set(nothing.values()) == {KindSummary()}
    assert figures[Lane.DP] == KindSummary()
    assert figures[Lane.TP] == KindSummary(1, 150, pytest.approx(750), 0, 0)
    # A message is in flight from its send on; the wait before that is a bubble.
    pipeline = figures[Lane.PP]
    assert (pipeline.calls, pipeline.num_bytes) == (2, 64)
    assert pipeline.busy_ms == pytest.approx(2000, abs=50)
    assert pipeline.exposed_ms == pytest.approx(2000, abs=50)
    assert pipeline.bubble_ms == pytest.approx(1000, abs=50)
