from __future__ import annotations

import pytest

from megatron_overlap.timeline.exposure import KindSummary, busy_time, send_times, summarize
from megatron_overlap.timeline.spans import Lane, MessageKey, Recording, Span

KEY = MessageKey("F", 0, 3)


def test_busy_time_counts_each_moment_once() -> None:
    assert busy_time([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (5.0, 5.0)]) == 4.0
    assert busy_time([]) == 0.0


def test_kinds_are_counted_apart() -> None:
    recording = Recording(
        operations=(
            Span(Lane.TP, "a", 0.0, 2.0, 10),
            Span(Lane.TP, "b", 1.0, 3.0, 20),
            Span(Lane.DP, "c", 0.0, 9.0, 5),
        ),
        waits=(Span(Lane.TP, "b", 2.5, 3.0), Span(Lane.DP, "c", 8.0, 9.0)),
        compute=(Span(Lane.COMPUTE, "F0.0", 0.0, 2.5),),
    )
    assert summarize(recording) == {
        Lane.TP: KindSummary(calls=2, num_bytes=30, busy_ms=3000.0, exposed_ms=500.0),
        Lane.PP: KindSummary(),
        Lane.DP: KindSummary(calls=1, num_bytes=5, busy_ms=9000.0, exposed_ms=1000.0),
    }


@pytest.mark.parametrize(
    ("sent", "bubble_ms", "exposed_ms", "busy_ms"),
    [
        (0.5, 0.0, 3000.0, 3000.0),
        (2.0, 1000.0, 2000.0, 2000.0),
        (4.5, 3000.0, 0.0, 0.0),
        (None, 0.0, 3000.0, 3000.0),
    ],
)
def test_pipeline_wait_is_bubble_until_its_message_is_sent(
    sent: float | None, bubble_ms: float, exposed_ms: float, busy_ms: float
) -> None:
    recording = Recording(
        operations=(Span(Lane.PP, "recv", 1.0, 4.0, 0, KEY),), waits=(Span(Lane.PP, "recv", 1.0, 4.0, 0, KEY),)
    )
    summary = summarize(recording, None if sent is None else {KEY: sent})[Lane.PP]
    assert (summary.bubble_ms, summary.exposed_ms, summary.busy_ms) == (bubble_ms, exposed_ms, busy_ms)


def test_send_times_are_those_of_the_sender() -> None:
    other = MessageKey("B", 1, 0)
    recording = Recording(
        operations=(
            Span(Lane.PP, "send", 2.0, 3.0, 64, KEY),
            Span(Lane.PP, "recv", 0.0, 3.0, 0, other),
            Span(Lane.TP, "x", 1.0, 2.0, 64),
        )
    )
    assert send_times(recording) == {KEY: 2.0}
