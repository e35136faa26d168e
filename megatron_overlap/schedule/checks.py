"""Checks of action lists; each raises a ScheduleError that shows where the list is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_overlap.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    WAITS_OF_RECEIVES,
    WAITS_OF_SENDS,
    Action,
    ActionKind,
    message_of,
    output_of,
    peer_stage,
    producer,
)
from megatron_overlap.schedule.draw import draw_lists
from megatron_overlap.schedule.simulate import DeadlockError, Durations, Lists, simulate
from megatron_overlap.timeline.spans import MessageKey


class ScheduleError(Exception):
    """A schedule breaks one of its rules."""


def check_lists(lists: Lists, placement: Sequence[int], microbatches: int, *, forward_only: bool = False) -> None:
    """Complete, every message sent and received once and in order, free of deadlock."""
    check_complete(lists, placement, microbatches, forward_only=forward_only)
    check_messages(lists, placement)
    check_deadlock_free(lists, placement)


def check_complete(lists: Lists, placement: Sequence[int], microbatches: int, *, forward_only: bool = False) -> None:
    """On the rank of each stage every microbatch goes once forward, then once backward, in ascending order."""
    kinds = [ActionKind.FORWARD] if forward_only else [ActionKind.FORWARD, ActionKind.BACKWARD]
    next_microbatch = {(kind, stage): 0 for kind in kinds for stage in range(len(placement))}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if action.kind not in COMPUTE:
                continue
            expected = next_microbatch.get((action.kind, action.stage), -1)
            after_forward = (
                action.kind is ActionKind.FORWARD
                or action.microbatch < next_microbatch[ActionKind.FORWARD, action.stage]
            )
            on_rank = action.stage < len(placement) and placement[action.stage] == rank
            if action.microbatch != expected or not after_forward or not on_rank:
                raise _error("not each microbatch once forward, then once backward", lists, {rank: index})
            next_microbatch[action.kind, action.stage] += 1
    missing = [f"{kind}{stage}.{number}" for (kind, stage), number in next_microbatch.items() if number < microbatches]
    if missing:
        raise ScheduleError(f"schedule lacks {' '.join(missing)} and what follows")
    extra = [
        f"{kind}{stage}.{number - 1}" for (kind, stage), number in next_microbatch.items() if number > microbatches
    ]
    if extra:
        raise ScheduleError(f"schedule has {' '.join(extra)}, but only {microbatches} microbatches")


def check_messages(lists: Lists, placement: Sequence[int]) -> None:
    """Sends follow their compute, receives come before their use, all sends are waited for, order agrees at both ends.

    Order has to agree on each way (sender, receiver, direction): a back end without tags matches by order alone.
    """
    sends: defaultdict[tuple[int, int, str], list[MessageKey]] = defaultdict(list)
    receives: defaultdict[tuple[int, int, str], list[MessageKey]] = defaultdict(list)
    for rank, actions in enumerate(lists):
        open_messages = _check_rank(lists, placement, rank)
        if open_messages:
            raise ScheduleError(f"rank {rank} ends with messages nobody waits for: {open_messages}")
        for action in actions:
            if action.kind in SENDS:
                key = message_of(action)
                sends[rank, placement[peer_stage(action)], key.direction].append(key)
            elif action.kind in RECEIVES:
                key = message_of(action)
                receives[placement[peer_stage(action)], rank, key.direction].append(key)
    for way in sends.keys() | receives.keys():
        if sends[way] != receives[way]:
            sender, receiver, direction = way
            differ = next((pair for pair in zip(sends[way], receives[way], strict=False) if pair[0] != pair[1]), None)
            raise ScheduleError(
                f"rank {sender} sends {len(sends[way])} {direction} messages to rank {receiver}, which receives "
                f"{len(receives[way])}; first difference: {differ}"
            )


def _check_rank(lists: Lists, placement: Sequence[int], rank: int) -> list[str]:
    """Checks the order of actions on one rank by a state per message; returns the messages left unfinished."""
    state: dict[tuple[bool, MessageKey], str] = {}
    needed: tuple[str, ...]
    done: set[Action] = set()
    for index, action in enumerate(lists[rank]):
        if action.kind is ActionKind.REDUCE:
            continue
        if action.kind in COMPUTE:
            done.add(action)
            source = producer(action, len(placement))
            if source is None or placement[source.stage] == rank:
                continue
            slot, needed, after = (False, output_of(source)), ("posted", "waited"), "used"
        else:
            slot = (action.kind in SENDS or action.kind in WAITS_OF_SENDS, message_of(action))
            needed, after = _STEPS[action.kind]
            if action.kind in SENDS and Action(_MAKER[action.kind], action.stage, action.microbatch) not in done:
                raise _error("a send before its data is made", lists, {rank: index})
        if state.get(slot, "none") not in needed:
            raise _error(f"{action} where its message is in state {state.get(slot, 'none')!r}", lists, {rank: index})
        state[slot] = after
    final = {True: "waited", False: "used"}
    return [str(key) for (is_send, key), reached in state.items() if reached != final[is_send]]


_MAKER = {ActionKind.SEND_FORWARD: ActionKind.FORWARD, ActionKind.SEND_BACKWARD: ActionKind.BACKWARD}
# State of a message on one rank that an action needs, and the state after it.
_STEPS: dict[ActionKind, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(SENDS, (("none",), "issued")),
    **dict.fromkeys(WAITS_OF_SENDS, (("issued",), "waited")),
    **dict.fromkeys(RECEIVES, (("none",), "posted")),
    **dict.fromkeys(WAITS_OF_RECEIVES, (("posted",), "waited")),
}


def check_deadlock_free(lists: Lists, placement: Sequence[int]) -> None:
    """Runs the lists where a send completes only when its receive has been posted."""
    try:
        simulate(lists, placement, Durations.equal(len(placement)))
    except DeadlockError as error:
        stuck = {rank: at for rank, at in enumerate(error.positions) if at < len(lists[rank])}
        raise _error("deadlock, these ranks wait for each other", lists, stuck) from error


def check_bounds(lists: Lists, stash: Sequence[int], sends: int) -> None:
    """Per rank at most `stash[rank]` microbatches between forward and backward, `sends` sends of each direction."""
    for rank, actions in enumerate(lists):
        held = peak_stash(actions)
        if held > stash[rank]:
            raise ScheduleError(f"rank {rank} holds {held} microbatches, more than {stash[rank]}")
        for kind in SENDS:
            outstanding = peak_outstanding(actions, kind)
            if outstanding > sends:
                raise ScheduleError(f"rank {rank} has {outstanding} sends {kind} outstanding, more than {sends}")


def peak_stash(actions: Sequence[Action]) -> int:
    """Most microbatches (of all stages of the rank) whose forward has run and whose backward has not."""
    change = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}
    return _peak([change.get(action.kind, 0) for action in actions])


def peak_outstanding(actions: Sequence[Action], kind: ActionKind) -> int:
    """Most sends of a kind issued and not waited for, or receives of a kind posted and neither waited for nor used."""
    held: Counter[MessageKey] = Counter()
    changes: list[int] = []
    for action in actions:
        change = 0
        if action.kind is kind:
            held[message_of(action)] = change = 1
        elif key := _completes(action, kind):
            change = -held.pop(key, 0)
        changes.append(change)
    return _peak(changes)


def _completes(action: Action, kind: ActionKind) -> MessageKey | None:
    if action.kind in WAITS_OF_SENDS and kind in SENDS:
        return message_of(action)
    if action.kind in WAITS_OF_RECEIVES and kind in RECEIVES:
        return message_of(action)
    if kind is ActionKind.RECV_FORWARD and action.kind is ActionKind.FORWARD:
        return MessageKey("F", action.stage - 1, action.microbatch)
    if kind is ActionKind.RECV_BACKWARD and action.kind is ActionKind.BACKWARD:
        return MessageKey("B", action.stage + 1, action.microbatch)
    return None


def _peak(changes: Sequence[int]) -> int:
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak


def _error(problem: str, lists: Lists, positions: dict[int, int]) -> ScheduleError:
    return ScheduleError(f"{problem}\n{draw_lists(lists, positions)}")
