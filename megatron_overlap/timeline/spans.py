"""Spans of compute, communication and waiting, recorded while a step runs or made by the schedule simulator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple


class Lane(StrEnum):
    """What a span is about: compute, or one of the three kinds of communication."""

    COMPUTE = "compute"
    TP = "tp"
    PP = "pp"
    DP = "dp"


class MessageKey(NamedTuple):
    """Names one pipeline message of a step, the same on its sender and its receiver; stage is the sending one."""

    direction: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in seconds on one lane; num_bytes are bytes sent, so a receive has none."""

    lane: Lane
    name: str
    start: float
    end: float
    num_bytes: int = 0
    key: MessageKey | None = None

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Recording:
    """What finished between two calls of `Recorder.take`, each list in order of completion."""

    operations: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    compute: tuple[Span, ...] = ()


class OpenSpan:
    """A span that has started: `finish` it from any thread, or use it as a context; the first end counts."""

    __slots__ = ("_finished", "_key", "_lane", "_name", "_num_bytes", "_recorder", "_target", "start")

    def __init__(
        self, recorder: Recorder, target: list[Span], lane: Lane, name: str, num_bytes: int, key: MessageKey | None
    ) -> None:
        self._recorder = recorder
        self._target = target
        self._lane = lane
        self._name = name
        self._num_bytes = num_bytes
        self._key = key
        self._finished = False
        self.start = recorder.clock()

    def finish(self, end: float | None = None, *, start: float | None = None) -> None:
        """Ends the span now, or at `end`; `start` replaces its start, where only a device knows both times."""
        end = self._recorder.clock() if end is None else end
        with self._recorder.lock:
            if self._finished:
                return
            self._finished = True
            if self._recorder.enabled:
                start = self.start if start is None else start
                self._target.append(Span(self._lane, self._name, start, end, self._num_bytes, self._key))

    def __enter__(self) -> OpenSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class _NoSpan(OpenSpan):
    """Stands in while recording is off."""

    __slots__ = ()

    def __init__(self) -> None:
        self.start = 0.0

    def finish(self, end: float | None = None, *, start: float | None = None) -> None:
        pass


_NO_SPAN = _NoSpan()


class Recorder:
    """Collects spans from several threads.

    A span belongs to the recording taken after it finished, so an operation still in flight at `take` is part of
    the next one. What finishes while `enabled` is false is dropped.
    """

    def __init__(self, *, enabled: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = enabled
        self.clock = clock
        self.lock = threading.Lock()
        self._operations: list[Span] = []
        self._waits: list[Span] = []
        self._compute: list[Span] = []

    def operation(self, lane: Lane, name: str, num_bytes: int = 0, *, key: MessageKey | None = None) -> OpenSpan:
        """Opens a communication operation at its issue; finish it at its completion."""
        return OpenSpan(self, self._operations, lane, name, num_bytes, key) if self.enabled else _NO_SPAN

    def wait(self, lane: Lane, name: str, *, key: MessageKey | None = None) -> OpenSpan:
        """Opens a wait for the operation of this lane, name and key."""
        return OpenSpan(self, self._waits, lane, name, 0, key) if self.enabled else _NO_SPAN

    def compute(self, name: str) -> OpenSpan:
        """Opens a stretch of compute."""
        return OpenSpan(self, self._compute, Lane.COMPUTE, name, 0, None) if self.enabled else _NO_SPAN

    def take(self) -> Recording:
        """Returns and forgets everything that has finished so far."""
        with self.lock:
            recording = Recording(tuple(self._operations), tuple(self._waits), tuple(self._compute))
            for spans in (self._operations, self._waits, self._compute):
                spans.clear()
        return recording
