"""Lines of JSON Lines files, plain or `.gz`: read in batches, and dealt out to partition files."""

from __future__ import annotations

import glob
import gzip
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

BATCH_LINES = 256
BATCH_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of a file; the first has number `first_line` (from 1)."""

    path: Path
    first_line: int
    lines: tuple[bytes, ...]


def input_files(pattern: str) -> list[Path]:
    """The file, or the files that a glob pattern matches, in the order of their names."""
    if Path(pattern).is_file():
        return [Path(pattern)]
    files = [Path(name) for name in sorted(glob.glob(pattern)) if Path(name).is_file()]
    if not files:
        raise ValueError(f"--input {pattern}: no such file")
    return files


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends, without a byte order mark."""
    with _open(path) as file:
        try:
            for number, line in enumerate(file):
                yield line.removeprefix(BOM) if number == 0 else line
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: broken gzip file ({error})") from error


def read_batches(paths: Sequence[Path], max_lines: int | None = None) -> Iterator[LineBatch]:
    """All lines in order, or the first `max_lines`, cut by number and size."""
    left = max_lines
    for path in paths:
        lines: list[bytes] = []
        num_bytes, first = 0, 1
        for line in read_lines(path):
            if left is not None:
                if left == 0:
                    break
                left -= 1
            lines.append(line)
            num_bytes += len(line)
            if len(lines) >= BATCH_LINES or num_bytes >= BATCH_BYTES:
                yield LineBatch(path, first, tuple(lines))
                first += len(lines)
                lines, num_bytes = [], 0
        if lines:
            yield LineBatch(path, first, tuple(lines))


def partition(paths: Sequence[Path], outputs: Sequence[Path], keep_order: bool) -> None:
    """Deal all lines out to `outputs`: in turn, or with `keep_order` in contiguous blocks.

    Files of an earlier run are used again if they are not older than the input and have as many lines.
    """
    if all(path.is_file() for path in outputs):
        newest = max(path.stat().st_mtime_ns for path in paths)
        if all(path.stat().st_mtime_ns >= newest for path in outputs) and _count(outputs) == _count(paths):
            logger.info("using the partition files %s ... %s of an earlier run", outputs[0], outputs[-1])
            return
        logger.warning("partition files %s ... are not those of this input, they are written anew", outputs[0])
    block = -(-_count(paths) // len(outputs)) if keep_order else 0
    partial = [path.with_name(f"{path.name}.partial") for path in outputs]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in partial]
        number = 0
        for path in paths:
            for line in read_lines(path):
                place = number // block if keep_order else number % len(files)
                files[place].write(line if line.endswith(b"\n") else line + b"\n")
                number += 1
    for path, name in zip(partial, outputs, strict=True):
        path.replace(name)


def _count(paths: Sequence[Path]) -> int:
    return sum(1 for path in paths for _ in read_lines(path))


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
