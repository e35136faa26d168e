"""Span files hold what was recorded, on the common clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_overlap.timeline.files import TimelineFile
from megatron_overlap.timeline.spans import Lane, MessageKey, Recording, Span


def test_spans_come_back_on_the_common_clock(tmp_path: Path) -> None:
    file = TimelineFile(str(tmp_path / "spans"), 3, clock_offset=0.5)
    send = Span(Lane.PP, "SF0.1", 1.0, 2.0, 64, MessageKey("F", 0, 1))
    wait = Span(Lane.TP, "qkv.forward", 2.5, 3.0)
    file.write(7, Recording(operations=(send,), waits=(wait,)))
    file.write(8, Recording())
    first, second = (json.loads(line) for line in (tmp_path / "spans" / "spans_rank_00003.jsonl").open())
    assert (first["rank"], first["iteration"], second["iteration"]) == (3, 7, 8)
    assert first["operations"] == [
        {"lane": "pp", "name": "SF0.1", "start": 1.5, "end": 2.5, "bytes": 64, "key": ["F", 0, 1]}
    ]
    assert first["waits"] == [{"lane": "tp", "name": "qkv.forward", "start": 3.0, "end": 3.5, "bytes": 0}]
    assert first["compute"] == second["operations"] == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--timeline-dir"):
        TimelineFile(str(tmp_path / "file" / "spans"), 0)
