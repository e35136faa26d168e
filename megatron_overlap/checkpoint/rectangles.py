"""Arithmetic of rectangles in a tensor of any number of dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rectangle:
    """The elements `offset <= index < offset + shape`; of zero dimensions: the one element of a scalar."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether this rectangle lies in a tensor of that shape."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            0 <= start <= end <= size for start, end, size in zip(self.offset, self.end, shape, strict=True)
        )

    def common(self, other: Rectangle) -> Rectangle | None:
        """The part that both have, None when they share no element."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(ends) - first for first, *ends in zip(start, self.end, other.end, strict=True))
        return Rectangle(start, shape) if all(size > 0 for size in shape) else None

    def slices_within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Index of this rectangle in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def count_cover(target: Rectangle, rectangles: Sequence[Rectangle]) -> tuple[int, int]:
    """How many rectangles hold the least and the most covered element of `target`.

    The borders of all rectangles cut the target into cells, and within a cell the count is the same everywhere.
    """
    if target.numel == 0:
        return 1, 1
    parts = [part for part in map(target.common, rectangles) if part is not None]
    borders = [
        sorted({target.offset[dim], target.end[dim]} | {edge for p in parts for edge in (p.offset[dim], p.end[dim])})
        for dim in range(len(target.shape))
    ]
    cell_of = [{edge: cell for cell, edge in enumerate(edges)} for edges in borders]
    counts = np.zeros([len(edges) - 1 for edges in borders], dtype=np.int64)
    for part in parts:
        index = tuple(
            slice(cells[start], cells[end]) for cells, start, end in zip(cell_of, part.offset, part.end, strict=True)
        )
        counts[index] += 1
    return int(counts.min()), int(counts.max())


def describe(rectangle: Rectangle) -> str:
    """Text such as `[0:4, 8:16]` for error messages."""
    ranges = itertools.starmap("{}:{}".format, zip(rectangle.offset, rectangle.end, strict=True))
    return f"[{', '.join(ranges)}]"
