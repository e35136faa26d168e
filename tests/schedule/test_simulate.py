"""Step times against closed formulas; tF, tB: a whole rank's forward and backward, c: one message."""

from __future__ import annotations

import itertools

import pytest

from megatron_overlap.schedule.actions import parse_actions
from megatron_overlap.schedule.communication import P2PMode
from megatron_overlap.schedule.plan import PlanRequest, ScheduleKind, Warmup, build_plan
from megatron_overlap.schedule.simulate import DeadlockError, Durations, simulate, step_time
from megatron_overlap.timeline.exposure import send_times, summarize
from megatron_overlap.timeline.spans import Lane, MessageKey, Recording

FORWARD, BACKWARD = 1.0, 2.0
P2P = 0.01


def time_of(request: PlanRequest, p2p: float = 0.0) -> float:
    plan = build_plan(request)
    forward, backward = FORWARD / request.virtual, BACKWARD / request.virtual
    durations = Durations.equal(plan.num_stages, forward=forward, backward=backward, p2p=p2p)
    return step_time(simulate(plan.lists, plan.placement, durations))


def exposed_messages(request: PlanRequest) -> float:
    """Step time lost to messages, in units of one message."""
    return (time_of(request, P2P) - time_of(request)) / P2P


def bubble_ratio(request: PlanRequest) -> float:
    ideal = request.microbatches * (FORWARD + BACKWARD)
    return (time_of(request) - ideal) / ideal


@pytest.mark.parametrize(
    ("schedule", "warmup", "p2p"),
    [
        (ScheduleKind.ONE_F_ONE_B, Warmup.PLAIN, P2PMode.BLOCKING),
        (ScheduleKind.ONE_F_ONE_B, Warmup.PLAIN, P2PMode.AHEAD),
        (ScheduleKind.ONE_F_ONE_B, Warmup.EAGER, P2PMode.AHEAD),
        (ScheduleKind.GPIPE, Warmup.AUTO, P2PMode.BLOCKING),
        (ScheduleKind.GPIPE, Warmup.AUTO, P2PMode.AHEAD),
    ],
)
def test_bubble_of_one_stage_per_rank(schedule: ScheduleKind, warmup: Warmup, p2p: P2PMode) -> None:
    for pp, times in itertools.product((1, 2, 3, 4, 8), (1, 2, 4)):
        request = PlanRequest(pp, pp * times, schedule=schedule, warmup=warmup, p2p=p2p)
        assert bubble_ratio(request) == pytest.approx((pp - 1) / (pp * times))


def test_bubble_of_interleaving() -> None:
    for pp, virtual, times in itertools.product((1, 2, 3, 4, 8), (2, 3), (1, 2)):
        ratio = bubble_ratio(PlanRequest(pp, pp * times, virtual))
        assert ratio == pytest.approx((pp - 1) / (virtual * pp * times))


def test_bubble_of_blocking_pairs_does_not_grow_with_microbatches() -> None:
    """Ranks that warm up wait for neighbours in a forward and backward pair: at most (p / 2 - 1) tF / v more."""
    for pp, virtual, times in itertools.product((2, 4, 8), (1, 2), (1, 4)):
        request = PlanRequest(pp, pp * times, virtual, warmup=Warmup.EAGER, p2p=P2PMode.BLOCKING)
        more = bubble_ratio(request) - (pp - 1) / (virtual * pp * times)
        ideal = pp * times * (FORWARD + BACKWARD)
        assert -1e-9 <= more * ideal <= (pp / 2 - 1) * FORWARD / virtual + 1e-9


@pytest.mark.parametrize(("pp", "times"), list(itertools.product((2, 4, 8), (1, 2, 4, 8))))
def test_exposed_messages_of_1f1b(pp: int, times: int) -> None:
    """Plain 2 (m (p - 1) / p + p - 2), eager 2 (p - 1), blocking 2 (m + p - 2) from p = 4 on."""
    microbatches = pp * times
    plain = PlanRequest(pp, microbatches, warmup=Warmup.PLAIN)
    assert exposed_messages(plain) == pytest.approx(2 * (microbatches * (pp - 1) / pp + pp - 2))
    assert exposed_messages(PlanRequest(pp, microbatches, warmup=Warmup.EAGER)) == pytest.approx(2 * (pp - 1))
    if pp >= 4:
        blocking = PlanRequest(pp, microbatches, p2p=P2PMode.BLOCKING)
        assert exposed_messages(blocking) == pytest.approx(2 * (microbatches + pp - 2))


@pytest.mark.parametrize(("pp", "virtual", "times"), list(itertools.product((2, 4, 8), (2, 4), (1, 2))))
def test_exposed_messages_of_interleaving(pp: int, virtual: int, times: int) -> None:
    """Fill and drain only: 2 (p v - 1), whatever the number of microbatches."""
    ahead = PlanRequest(pp, pp * times, virtual)
    assert exposed_messages(ahead) == pytest.approx(2 * (pp * virtual - 1))
    blocking = PlanRequest(pp, pp * times, virtual, p2p=P2PMode.BLOCKING)
    assert exposed_messages(blocking) > exposed_messages(ahead)


def test_spans_of_one_message() -> None:
    lists = [parse_actions("F0.0 SF0.0 WSF0.0 R0"), parse_actions("RF1.0 F1.0 R1")]
    recordings = simulate(lists, (0, 1), Durations([2.0, 3.0], [0.0, 0.0], p2p=0.5, reduce=[4.0, 1.0], message_bytes=8))
    key = MessageKey("F", 0, 0)

    def times(spans: tuple[object, ...]) -> list[tuple[str, float, float]]:
        return [(span.name, span.start, span.end) for span in spans]  # type: ignore[attr-defined]

    assert times(recordings[0].compute) == [("F0.0", 0.0, 2.0)]
    assert times(recordings[0].operations) == [("SF0.0", 2.0, 2.5), ("R0", 2.5, 6.5)]
    assert times(recordings[0].waits) == [("WSF0.0", 2.0, 2.5), ("R0", 2.5, 6.5)]
    assert times(recordings[1].operations) == [("RF0.0", 0.0, 2.5), ("R1", 5.5, 6.5)]
    assert times(recordings[1].waits) == [("F1.0", 0.0, 2.5), ("R1", 5.5, 6.5)]
    assert step_time(recordings) == 6.5
    assert send_times(recordings[0]) == {key: 2.0}
    pp = summarize(recordings[1], send_times(recordings[0]))[Lane.PP]
    assert (pp.calls, pp.num_bytes, pp.exposed_ms, pp.bubble_ms, pp.busy_ms) == (1, 0, 500.0, 2000.0, 500.0)


def test_messages_of_one_way_follow_each_other() -> None:
    lists = [
        parse_actions("F0.0 F0.1 SF0.0 SF0.1 WSF0.0 WSF0.1"),
        parse_actions("RF1.0 RF1.1 F1.0 F1.1"),
    ]
    recordings = simulate(lists, (0, 1), Durations.equal(2, p2p=3.0))
    assert [span.start for span in recordings[1].compute] == [5.0, 8.0]


def test_waiting_is_compute_standing_still() -> None:
    """On every rank waits and compute fill the time up to its last action without a hole."""
    plan = build_plan(PlanRequest(4, 8, 2))
    recordings = simulate(plan.lists, plan.placement, Durations.equal(8, p2p=0.1))
    for recording in recordings:
        spans = sorted((*recording.compute, *recording.waits), key=lambda span: span.start)
        assert spans[0].start == 0.0
        for before, after in itertools.pairwise(spans):
            assert after.start == pytest.approx(before.end)


def test_deadlock_is_an_error() -> None:
    with pytest.raises(DeadlockError) as error:
        simulate([parse_actions("F0.0 WSF0.0"), parse_actions("F1.0")], (0, 1), Durations.equal(2))
    assert error.value.positions == [1, 0]


def test_nothing_takes_no_time() -> None:
    assert step_time([Recording()]) == 0.0
