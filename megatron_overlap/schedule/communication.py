"""The pass that adds sends, receives and their waits to compute orders.

Where a receive is posted. Give every action a time of 1 and messages none, and take the start times of that run
(`unit_starts`). The latest place for a receive is directly before the first action of its rank that starts when the
message has been made, or later. Its consumer is such an action, so this is early enough; and it is early enough for
the sender too, which may wait for the send at once: whatever precedes the receive starts before the message is made,
and whatever follows the wait starts after, so all waiting points back in time and no circle of waits can close. This
holds for every compute order that can run at all. Receives of one way (sender, receiver, direction) are
posted in the order of their sends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_overlap.schedule.actions import (
    RECEIVE_OF,
    SEND_OF,
    WAIT_OF,
    Action,
    ActionKind,
    producer,
)
from megatron_overlap.schedule.simulate import Lists, unit_starts


class P2PMode(StrEnum):
    """How pipeline messages are waited for.

    blocking: sends and receives between two computes are issued together and waited for before the second one.
    ahead: a receive is posted at least `ahead` computes before its use, and waited for by its use; a send is waited
    for only before the rank would have more than `max_sends` of its direction outstanding, and at the end.
    """

    BLOCKING = "blocking"
    AHEAD = "ahead"


@dataclass(slots=True)
class _Gap:
    """The communication a rank issues between two of its computes."""

    sends: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)


def add_communication(
    orders: Lists, placement: Sequence[int], mode: P2PMode, *, ahead: int = 1, max_sends: int = 2
) -> list[list[Action]]:
    """Compute orders of all ranks with their messages; stages of one rank hand over without any."""
    gaps = _place_messages(orders, placement, ahead if mode is P2PMode.AHEAD else 0)
    if mode is P2PMode.BLOCKING:
        return [_blocking(order, own) for order, own in zip(orders, gaps, strict=True)]
    return [_ahead(order, own, max_sends) for order, own in zip(orders, gaps, strict=True)]


def _place_messages(orders: Lists, placement: Sequence[int], ahead: int) -> list[list[_Gap]]:
    """Per rank one gap before each compute, and one at the end."""
    starts = unit_starts(orders, placement)
    gaps = [[_Gap() for _ in range(len(order) + 1)] for order in orders]
    made_at: dict[Action, tuple[int, int]] = {
        action: (rank, index) for rank, order in enumerate(orders) for index, action in enumerate(order)
    }
    for rank, order in enumerate(orders):
        for index, action in enumerate(order):
            source = producer(action, len(placement))
            if source is None or placement[source.stage] == rank:
                continue
            sender, sent = made_at[source]
            gaps[sender][sent + 1].sends.append(Action(SEND_OF[source.kind], source.stage, source.microbatch))
            latest = bisect_left(starts[rank], starts[sender][sent] + 1)
            place = min(latest, max(index - ahead, 0))
            gaps[rank][place].receives.append(Action(RECEIVE_OF[action.kind], action.stage, action.microbatch))
    return gaps


def _blocking(order: Sequence[Action], gaps: Sequence[_Gap]) -> list[Action]:
    actions: list[Action] = []
    for index, gap in enumerate(gaps):
        issued = [*gap.sends, *gap.receives]
        actions += [*issued, *map(_wait_for, issued), *order[index : index + 1]]
    return actions


def _ahead(order: Sequence[Action], gaps: Sequence[_Gap], max_sends: int) -> list[Action]:
    actions: list[Action] = []
    outstanding: dict[ActionKind, deque[Action]] = {kind: deque() for kind in SEND_OF.values()}
    for index, gap in enumerate(gaps):
        for send in gap.sends:
            sends = outstanding[send.kind]
            if len(sends) == max_sends:
                actions.append(_wait_for(sends.popleft()))
            actions.append(send)
            sends.append(send)
        actions += [*gap.receives, *order[index : index + 1]]
    return [*actions, *(_wait_for(send) for sends in outstanding.values() for send in sends)]


def _wait_for(action: Action) -> Action:
    return Action(WAIT_OF[action.kind], action.stage, action.microbatch)
