"""Every check finds the fault it is for, and shows where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_overlap.schedule.actions import Action, parse_action, parse_actions
from megatron_overlap.schedule.checks import (
    ScheduleError,
    check_bounds,
    check_complete,
    check_deadlock_free,
    check_lists,
    check_messages,
    peak_outstanding,
    peak_stash,
)
from megatron_overlap.schedule.plan import PlanRequest, build_plan

Lists = list[list[Action]]
PLACEMENT = (0, 1)


def good_lists() -> Lists:
    return [list(actions) for actions in build_plan(PlanRequest(2, 3)).lists]


def without(lists: Lists, rank: int, text: str) -> None:
    lists[rank].remove(parse_action(text))


def swapped(lists: Lists, rank: int, one: str, other: str) -> None:
    first, second = (lists[rank].index(parse_action(text)) for text in (one, other))
    lists[rank][first], lists[rank][second] = lists[rank][second], lists[rank][first]


def moved(lists: Lists, rank: int, text: str, to: int) -> None:
    without(lists, rank, text)
    lists[rank].insert(to, parse_action(text))


def test_a_built_plan_passes() -> None:
    check_lists(good_lists(), PLACEMENT, 3)


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (lambda lists: without(lists, 1, "F1.1"), ">B1.1<"),
        (lambda lists: without(lists, 1, "B1.2"), "B1.2"),
        (lambda lists: swapped(lists, 1, "F1.0", "B1.0"), ">B1.0<"),
        (lambda lists: swapped(lists, 0, "F0.0", "F0.1"), ">F0.1<"),
        (lambda lists: lists[0].append(parse_action("F0.2")), ">F0.2<"),
        (lambda lists: lists[0].append(parse_action("F1.0")), ">F1.0<"),
        (lambda lists: lists[0].append(parse_action("F7.0")), ">F7.0<"),
        (lambda lists: lists[0].append(parse_action("F0.3")), "F0.3"),
    ],
)
def test_incomplete_lists(spoil: Callable[[Lists], None], shown: str) -> None:
    lists = good_lists()
    spoil(lists)
    with pytest.raises(ScheduleError, match=shown):
        check_complete(lists, PLACEMENT, 3)


@pytest.mark.parametrize(
    ("spoil", "shown"),
    [
        (lambda lists: without(lists, 0, "SF0.1"), ">WSF0.1<"),
        (lambda lists: without(lists, 0, "WSF0.1"), "nobody waits for"),
        (lambda lists: lists[0].append(parse_action("WSF0.1")), ">WSF0.1<"),
        (lambda lists: without(lists, 1, "RF1.1"), ">F1.1<"),
        (lambda lists: lists[1].insert(0, parse_action("WRF1.0")), ">WRF1.0<"),
        (lambda lists: lists[1].append(parse_action("RF1.1")), ">RF1.1<"),
        (lambda lists: moved(lists, 1, "RF1.2", 0), "first difference"),
        (lambda lists: moved(lists, 0, "SF0.2", 0), ">SF0.2<"),
        (lambda lists: lists[1].append(parse_action("RF1.7")), "nobody waits for"),
    ],
)
def test_unmatched_messages(spoil: Callable[[Lists], None], shown: str) -> None:
    lists = good_lists()
    spoil(lists)
    with pytest.raises(ScheduleError, match=shown):
        check_messages(lists, PLACEMENT)


def test_message_that_nobody_receives() -> None:
    lists = [parse_actions("F0.0 SF0.0 WSF0.0"), []]
    with pytest.raises(ScheduleError, match="rank 0 sends 1 F messages to rank 1, which receives 0"):
        check_messages(lists, PLACEMENT)


def test_deadlock_shows_every_rank_that_is_stuck() -> None:
    """Both ranks wait for their send before they post their receive."""
    lists = [
        parse_actions("RF2.0 F0.0 SF0.0 WSF0.0 F2.0 F0.1 SF0.1 WSF0.1 RF2.1 F2.1"),
        parse_actions("RF1.0 F1.0 SF1.0 RF1.1 F1.1 SF1.1 WSF1.1 WSF1.0"),
    ]
    check_deadlock_free(lists, (0, 1, 0))
    swapped(lists, 1, "RF1.1", "SF1.0")
    moved(lists, 0, "RF2.0", 3)
    moved(lists, 1, "WSF1.0", 2)
    moved(lists, 1, "RF1.0", 4)
    with pytest.raises(ScheduleError, match=r"(?s)rank 0 .*>WSF0.0<.*rank 1 .*>F1.0<"):
        check_deadlock_free(lists, (0, 1, 0))


def test_bounds() -> None:
    lists = [parse_actions("F0.0 SF0.0 F0.1 SF0.1 F0.2 SF0.2 WSF0.0 WSF0.1 WSF0.2 B0.0 B0.1 B0.2")]
    check_bounds(lists, [3], 3)
    with pytest.raises(ScheduleError, match="holds 3 microbatches, more than 2"):
        check_bounds(lists, [2], 3)
    with pytest.raises(ScheduleError, match="3 sends SF outstanding, more than 2"):
        check_bounds(lists, [3], 2)


def test_peaks() -> None:
    actions = parse_actions("RF1.0 RF1.1 F1.0 RF1.2 WRF1.1 F1.1 F1.2 B1.0 B1.1 B1.2")
    assert peak_stash(actions) == 3
    assert peak_outstanding(actions, parse_action("RF1.0").kind) == 2
    assert peak_outstanding(actions, parse_action("SF1.0").kind) == 0
