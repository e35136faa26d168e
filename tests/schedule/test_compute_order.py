from __future__ import annotations

import pytest

from megatron_overlap.schedule.actions import Action, ActionKind, format_actions
from megatron_overlap.schedule.compute_order import (
    eager_warmup,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_warmup,
    is_legal_group_size,
    one_forward_one_backward,
    plain_warmup,
)


def leading_forwards(actions: list[Action]) -> int:
    return next(at for at, action in enumerate(actions) if action.kind is ActionKind.BACKWARD)


def test_gpipe() -> None:
    assert format_actions(gpipe(1, 3)) == "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"


@pytest.mark.parametrize(
    ("pp_rank", "expected"),
    [
        (0, "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"),
        (1, "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3"),
        (2, "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"),
    ],
)
def test_plain_1f1b(pp_rank: int, expected: str) -> None:
    assert format_actions(one_forward_one_backward(pp_rank, 4, warmup=plain_warmup(pp_rank, 3))) == expected


def test_eager_1f1b_runs_twice_as_many_forwards_first() -> None:
    orders = [one_forward_one_backward(rank, 16, warmup=eager_warmup(rank, 4)) for rank in range(4)]
    assert [leading_forwards(order) - 1 for order in orders] == [6, 4, 2, 0]


def test_warmup_is_capped_by_the_microbatches() -> None:
    assert format_actions(one_forward_one_backward(0, 2, warmup=eager_warmup(0, 8))) == "F0.0 F0.1 B0.0 B0.1"
    assert format_actions(one_forward_one_backward(0, 1, warmup=0)) == "F0.0 B0.0"


def test_interleaved_order_of_two_ranks_with_two_stages_each() -> None:
    assert format_actions(interleaved_1f1b(0, 2, 2, microbatches=4, group_size=2)) == (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    )
    assert format_actions(interleaved_1f1b(1, 2, 2, microbatches=4, group_size=2)) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_interleaved_warmup_counts() -> None:
    assert [interleaved_warmup(rank, 4, 3, group_size=4) for rank in range(4)] == [14, 12, 10, 8]
    order = interleaved_1f1b(1, 4, 3, microbatches=12, group_size=6)
    assert leading_forwards(order) - 1 == 2 * 2 + 2 * 6


def test_last_group_may_be_smaller() -> None:
    assert format_actions(forward_only(0, 2, 2, microbatches=5, group_size=3)) == (
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 F0.3 F0.4 F2.3 F2.4"
    )


@pytest.mark.parametrize(
    ("group_size", "pp", "microbatches", "legal"),
    [
        (4, 4, 8, True),
        (4, 4, 9, False),
        (5, 4, 9, True),
        (5, 4, 8, False),
        (3, 4, 9, False),
        (9, 4, 9, True),
        (10, 4, 9, False),
        (4, 4, 3, False),
        (0, 1, 3, False),
    ],
)
def test_legal_group_sizes(group_size: int, pp: int, microbatches: int, legal: bool) -> None:
    assert is_legal_group_size(group_size, pp, microbatches) is legal
