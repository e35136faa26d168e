"""Recordings as files: one JSON object per iteration and line, one file per rank."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_overlap.timeline.spans import Recording, Span


class TimelineFile:
    """Appends the spans of chosen iterations to `DIR/spans_rank_00003.jsonl`.

    An object has `rank`, `iteration` and the lists `operations`, `waits` and `compute`; a span is `{lane, name, start,
    end, bytes}`, with `key` `[direction, stage, microbatch]` for a pipeline message. Times are in seconds on the clock
    of the first pipeline rank, to which `clock_offset` leads.
    """

    def __init__(self, directory: str, rank: int, *, clock_offset: float = 0.0) -> None:
        self.path = Path(directory) / f"spans_rank_{rank:05d}.jsonl"
        self._rank = rank
        self._offset = clock_offset
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")
        except OSError as error:
            raise ValueError(f"--timeline-dir {directory} cannot be written: {error.strerror}") from error

    def write(self, iteration: int, recording: Recording) -> None:
        record = {
            "rank": self._rank,
            "iteration": iteration,
            "operations": self._plain(recording.operations),
            "waits": self._plain(recording.waits),
            "compute": self._plain(recording.compute),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _plain(self, spans: Iterable[Span]) -> list[dict[str, Any]]:
        return [
            {
                "lane": span.lane.value,
                "name": span.name,
                "start": span.start + self._offset,
                "end": span.end + self._offset,
                "bytes": span.num_bytes,
            }
            | ({"key": list(span.key)} if span.key is not None else {})
            for span in spans
        ]
