from __future__ import annotations

import threading
import time

import pytest

from megatron_overlap.timeline.spans import Lane, MessageKey, Recorder, Span


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_operation_lasts_from_issue_to_completion_however_late_its_wait(clock: FakeClock) -> None:
    recorder = Recorder(enabled=True, clock=clock)
    operation = recorder.operation(Lane.TP, "qkv.forward", 64)
    clock.now = 3.0
    operation.finish()
    clock.now = 10.0
    with recorder.wait(Lane.TP, "qkv.forward"):
        clock.now = 10.5
    operation.finish()
    recording = recorder.take()
    assert recording.operations == (Span(Lane.TP, "qkv.forward", 0.0, 3.0, 64),)
    assert recording.waits == (Span(Lane.TP, "qkv.forward", 10.0, 10.5),)


def test_operation_in_flight_at_take_belongs_to_the_next_recording(clock: FakeClock) -> None:
    recorder = Recorder(enabled=True, clock=clock)
    operation = recorder.operation(Lane.DP, "bucket 0", 8)
    clock.now = 1.0
    with recorder.compute("B0.0"):
        clock.now = 2.0
    first = recorder.take()
    clock.now = 4.0
    operation.finish()
    assert first.operations == ()
    assert first.compute == (Span(Lane.COMPUTE, "B0.0", 1.0, 2.0),)
    assert recorder.take().operations == (Span(Lane.DP, "bucket 0", 0.0, 4.0, 8),)
    assert recorder.take().operations == ()


def test_times_from_a_device_replace_host_times(clock: FakeClock) -> None:
    recorder = Recorder(enabled=True, clock=clock)
    recorder.operation(Lane.TP, "x").finish(7.0, start=5.0)
    assert recorder.take().operations == (Span(Lane.TP, "x", 5.0, 7.0),)


def test_disabled_recorder_keeps_nothing(clock: FakeClock) -> None:
    recorder = Recorder(enabled=True, clock=clock)
    in_flight = recorder.operation(Lane.PP, "send", 8, key=MessageKey("F", 0, 0))
    recorder.enabled = False
    in_flight.finish()
    recorder.operation(Lane.PP, "send").finish()
    with recorder.wait(Lane.PP, "send"), recorder.compute("F0.0"):
        pass
    recorder.enabled = True
    recording = recorder.take()
    assert (recording.operations, recording.waits, recording.compute) == ((), (), ())


def test_disabled_recorder_is_cheap() -> None:
    def never() -> float:
        raise AssertionError("a disabled recorder must not read the clock")

    recorder = Recorder(clock=never)
    start = time.perf_counter()
    for _ in range(1000):
        recorder.operation(Lane.TP, "x", 8).finish()
    assert time.perf_counter() - start < 0.1


def test_no_span_is_lost_between_threads_and_takes() -> None:
    recorder = Recorder(enabled=True)
    num_threads, per_thread = 4, 500
    opened = [[recorder.operation(Lane.TP, f"{i}.{j}") for j in range(per_thread)] for i in range(num_threads)]
    threads = [threading.Thread(target=lambda spans=spans: [span.finish() for span in spans]) for spans in opened]
    for thread in threads:
        thread.start()
    names: list[str] = []
    while any(thread.is_alive() for thread in threads):
        names += [span.name for span in recorder.take().operations]
    for thread in threads:
        thread.join()
    names += [span.name for span in recorder.take().operations]
    assert sorted(names) == sorted(f"{i}.{j}" for i in range(num_threads) for j in range(per_thread))
