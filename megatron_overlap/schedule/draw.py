"""Schedules as text: one line per rank, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_overlap.schedule.actions import Action
from megatron_overlap.schedule.simulate import Lists


def draw_grid(orders: Lists, starts: Sequence[Sequence[int]], *, mark: tuple[int, int] | None = None) -> str:
    """Compute actions in columns of unit time (`simulate.unit_starts`).

    `mark` (rank, index in its order) puts one cell between > and <, and then only columns near it are drawn.
    """
    cells = {
        (rank, start): str(action)
        for rank, (order, own) in enumerate(zip(orders, starts, strict=True))
        for action, start in zip(order, own, strict=True)
    }
    first, last = 0, 1 + max((column for _, column in cells), default=-1)
    if mark is not None:
        rank, index = mark
        column = starts[rank][index]
        cells[rank, column] = f">{cells[rank, column]}<"
        first, last = max(first, column - 6), min(last, column + 7)
    width = max(map(len, cells.values()), default=0)
    rows = [
        " ".join(cells.get((rank, column), ".").ljust(width) for column in range(first, last))
        for rank in range(len(orders))
    ]
    return "\n".join(f"rank {rank} | {row}".rstrip() for rank, row in enumerate(rows))


def draw_lists(lists: Lists, positions: Mapping[int, int], *, before: int = 4, after: int = 4) -> str:
    """Part of each list around its position, which is put between > and <; ranks without a position are left out."""
    return "\n".join(
        f"rank {rank} | {_around(lists[rank], position, before, after)}" for rank, position in positions.items()
    )


def _around(actions: Sequence[Action], position: int, before: int, after: int) -> str:
    first, last = max(position - before, 0), position + 1 + after
    words = [f">{action}<" if first + i == position else str(action) for i, action in enumerate(actions[first:last])]
    return " ".join([*(["..."] if first > 0 else []), *words, "..." if last < len(actions) else "(end)"])
