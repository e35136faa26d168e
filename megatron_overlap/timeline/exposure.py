"""How much of the communication in a recording was hidden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_overlap.timeline.spans import Lane, MessageKey, Recording, Span

COMMUNICATION_LANES = (Lane.TP, Lane.PP, Lane.DP)


@dataclass(frozen=True)
class KindSummary:
    """One kind of communication of one rank and step.

    busy_ms: time with at least one operation in flight. exposed_ms: time that compute stood still in a wait.
    bubble_ms: time in a wait for a pipeline message that its sender had not issued yet; not part of exposed_ms.
    """

    calls: int = 0
    num_bytes: int = 0
    busy_ms: float = 0.0
    exposed_ms: float = 0.0
    bubble_ms: float = 0.0


def summarize(recording: Recording, send_times: Mapping[MessageKey, float] | None = None) -> dict[Lane, KindSummary]:
    """Sums up a recording by kind of communication.

    `send_times` (on this rank's clock) splits pipeline waits into bubble and exposed, and makes an early posted
    receive busy from its send on only.
    """
    issued = send_times or {}
    return {lane: _summarize_lane(lane, recording, issued) for lane in COMMUNICATION_LANES}


def send_times(recording: Recording) -> dict[MessageKey, float]:
    """When each pipeline message that this rank sent was issued; receives are told apart by their zero bytes."""
    return {span.key: span.start for span in recording.operations if span.key is not None and span.num_bytes > 0}


def busy_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, in their unit."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _summarize_lane(lane: Lane, recording: Recording, issued: Mapping[MessageKey, float]) -> KindSummary:
    operations = [span for span in recording.operations if span.lane is lane]
    waits = [span for span in recording.waits if span.lane is lane]
    exposed = busy_time((_in_flight_from(wait, issued), wait.end) for wait in waits)
    return KindSummary(
        calls=len(operations),
        num_bytes=sum(span.num_bytes for span in operations),
        busy_ms=1e3 * busy_time((_in_flight_from(span, issued), span.end) for span in operations),
        exposed_ms=1e3 * exposed,
        bubble_ms=1e3 * (busy_time((wait.start, wait.end) for wait in waits) - exposed),
    )


def _in_flight_from(span: Span, issued: Mapping[MessageKey, float]) -> float:
    if span.key is None:
        return span.start
    return min(max(span.start, issued.get(span.key, span.start)), span.end)
