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
from megatron_overlap.schedule.simulate import Lists, block_starts


class P2PMode(StrEnum):
    """How pipeline messages are waited for.

    blocking: sends and receives between two computes (or pairs of them) are issued together and waited for there.
    ahead: a receive is posted at least `ahead` computes before its use, and waited for by its use; a send is waited
    for only before the rank would have more than `max_sends` of its direction outstanding, and at the end.

    Outstanding per rank and direction in mode ahead: at most `max_sends` sends; at most `ahead` + 1 receives posted
    and not used with GPipe and 1F1B, and up to N - p + p // 2 more with interleaving in groups of N microbatches, as
    a message that is made long before its use is received when it is sent.
    """

    BLOCKING = "blocking"
    AHEAD = "ahead"


Blocks = list[list[tuple[Action, ...]]]


@dataclass(slots=True)
class _Gap:
    """The communication a rank issues before one of its blocks, or after the last."""

    sends: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)


def add_communication(
    orders: Lists,
    placement: Sequence[int],
    mode: P2PMode,
    *,
    ahead: int = 1,
    max_sends: int = 2,
    pairs: bool = False,
) -> list[list[Action]]:
    """Compute orders of all ranks with their messages; stages of one rank hand over without any.

    With `pairs`, blocking mode exchanges once per forward and backward pair after the warm-up, as Megatron does with
    interleaving. It needs neighbours whose warm-up differs by two: one exchange per compute would have the forward
    of each wait for the backward that the other is in.
    """
    if mode is P2PMode.BLOCKING:
        blocks = [_in_pairs(order) if pairs else _alone(order) for order in orders]
        gaps = _place_messages(blocks, placement, ahead=0)
        return [_blocking(own, around) for own, around in zip(blocks, gaps, strict=True)]
    blocks = [_alone(order) for order in orders]
    gaps = _place_messages(blocks, placement, ahead=ahead)
    return [_ahead(own, around, max_sends) for own, around in zip(blocks, gaps, strict=True)]


def _alone(order: Sequence[Action]) -> list[tuple[Action, ...]]:
    return [(action,) for action in order]


def _in_pairs(order: Sequence[Action]) -> list[tuple[Action, ...]]:
    kinds = [action.kind for action in order]
    first_backward = kinds.index(ActionKind.BACKWARD) if ActionKind.BACKWARD in kinds else len(order)
    warmup = first_backward - 1 if first_backward < kinds.count(ActionKind.FORWARD) else first_backward
    num_paired = 2 * (kinds.count(ActionKind.FORWARD) - warmup)
    paired = [tuple(order[at : at + 2]) for at in range(warmup, warmup + num_paired, 2)]
    alone = _alone(order)
    return [*alone[:warmup], *paired, *alone[warmup + num_paired :]]


def _place_messages(blocks: Blocks, placement: Sequence[int], *, ahead: int) -> list[list[_Gap]]:
    """Per rank one gap before each block, and one at the end."""
    starts = block_starts(blocks, placement)
    gaps = [[_Gap() for _ in range(len(own) + 1)] for own in blocks]
    made_at: dict[Action, tuple[int, int]] = {
        action: (rank, index) for rank, own in enumerate(blocks) for index, block in enumerate(own) for action in block
    }
    for action, (rank, index) in made_at.items():
        source = producer(action, len(placement))
        if source is None or placement[source.stage] == rank:
            continue
        sender, sent = made_at[source]
        gaps[sender][sent + 1].sends.append(Action(SEND_OF[source.kind], source.stage, source.microbatch))
        latest = bisect_left(starts[rank], starts[sender][sent] + len(blocks[sender][sent]))
        place = min(latest, max(index - ahead, 0))
        gaps[rank][place].receives.append(Action(RECEIVE_OF[action.kind], action.stage, action.microbatch))
    return gaps


def _blocking(blocks: Sequence[Sequence[Action]], gaps: Sequence[_Gap]) -> list[Action]:
    actions: list[Action] = []
    for gap, block in zip(gaps, [*blocks, ()], strict=True):
        issued = [*gap.sends, *gap.receives]
        actions += [*issued, *map(_wait_for, issued), *block]
    return actions


def _ahead(blocks: Sequence[Sequence[Action]], gaps: Sequence[_Gap], max_sends: int) -> list[Action]:
    actions: list[Action] = []
    outstanding: dict[ActionKind, deque[Action]] = {kind: deque() for kind in SEND_OF.values()}
    for gap, block in zip(gaps, [*blocks, ()], strict=True):
        for send in gap.sends:
            sends = outstanding[send.kind]
            if len(sends) == max_sends:
                actions.append(_wait_for(sends.popleft()))
            actions.append(send)
            sends.append(send)
        actions += [*gap.receives, *block]
    return [*actions, *(_wait_for(send) for sends in outstanding.values() for send in sends)]


def _wait_for(action: Action) -> Action:
    return Action(WAIT_OF[action.kind], action.stage, action.microbatch)
