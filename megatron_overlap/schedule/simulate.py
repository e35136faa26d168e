"""Runs action lists against given durations, and returns the spans that an executor would record."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    message_of,
    output_of,
    peer_stage,
    producer,
)
from megatron_overlap.timeline.spans import Lane, MessageKey, Recording, Span

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Durations:
    """Seconds of each action; forward, backward and reduce by stage, p2p for one message, which cost no compute."""

    forward: Sequence[float]
    backward: Sequence[float]
    p2p: float = 0.0
    reduce: Sequence[float] | None = None
    message_bytes: int = 1

    def of(self, action: Action) -> float:
        if action.kind is ActionKind.FORWARD:
            return self.forward[action.stage]
        if action.kind is ActionKind.BACKWARD:
            return self.backward[action.stage]
        return self.reduce[action.stage] if self.reduce is not None else 0.0

    @staticmethod
    def equal(num_stages: int, *, forward: float = 1.0, backward: float = 2.0, p2p: float = 0.0) -> Durations:
        return Durations([forward] * num_stages, [backward] * num_stages, p2p)


class DeadlockError(Exception):
    """No rank can go on; `positions` says where in its list each rank stands (its length where it is done)."""

    def __init__(self, positions: list[int]) -> None:
        super().__init__(f"no pipeline rank can go on; positions {positions}")
        self.positions = positions


def unit_starts(orders: Lists, placement: Sequence[int]) -> list[list[int]]:
    """Start of every action of compute-only lists, where each takes a time of 1 and messages take none."""
    return block_starts([[(action,) for action in order] for order in orders], placement)


def block_starts(blocks: Sequence[Sequence[Sequence[Action]]], placement: Sequence[int]) -> list[list[int]]:
    """As `unit_starts`, for runs of actions with no communication inside: all inputs before, all outputs after."""
    ends: dict[Action, int] = {}
    starts: list[list[int]] = [[] for _ in blocks]
    nows = [0] * len(blocks)
    waiting: dict[Action, int] = {}
    awake = deque(range(len(blocks)))
    while awake:
        rank = awake.popleft()
        for block in blocks[rank][len(starts[rank]) :]:
            inputs = _inputs(block, len(placement))
            missing = next((source for source in inputs if source not in ends), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max([nows[rank], *(ends[source] for source in inputs)])
            starts[rank].append(start)
            nows[rank] = start + len(block)
            ends.update(dict.fromkeys(block, nows[rank]))
            awake.extend(waiting.pop(action) for action in block if action in waiting)
    if any(len(done) < len(own) for done, own in zip(starts, blocks, strict=True)):
        raise DeadlockError([sum(map(len, own[: len(done)])) for done, own in zip(starts, blocks, strict=True)])
    return starts


def _inputs(block: Sequence[Action], num_stages: int) -> list[Action]:
    sources = (producer(action, num_stages) for action in block)
    return [source for source in sources if source is not None and source not in block]


def simulate(lists: Lists, placement: Sequence[int], durations: Durations) -> list[Recording]:
    """Spans of every rank.

    A message moves once its send is issued, its receive posted, and the one before it on the same way (sender,
    receiver, direction) has arrived; only then are send and receive complete.
    """
    run = _Run(lists, placement, durations)
    run.to_the_end()
    return [rank.recording() for rank in run.ranks]


def step_time(recordings: Sequence[Recording]) -> float:
    """The end of the last span."""
    spans = (span for one in recordings for span in (*one.compute, *one.operations, *one.waits))
    return max((span.end for span in spans), default=0.0)


@dataclass(slots=True)
class _Message:
    sent: float | None = None
    posted: float | None = None
    arrived: float | None = None


@dataclass(slots=True)
class _Rank:
    actions: Sequence[Action]
    position: int = 0
    now: float = 0.0
    done: dict[Action, float] = field(default_factory=dict)
    operations: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    compute: list[Span] = field(default_factory=list)

    def recording(self) -> Recording:
        return Recording(tuple(self.operations), tuple(self.waits), tuple(self.compute))


class _Run:
    """Advances each rank until it must wait for something that is not known yet; arrival of a message wakes it."""

    def __init__(self, lists: Lists, placement: Sequence[int], durations: Durations) -> None:
        self.placement = placement
        self.durations = durations
        self.ranks = [_Rank(actions) for actions in lists]
        self.messages: defaultdict[MessageKey, _Message] = defaultdict(_Message)
        self.way_free: defaultdict[tuple[int, int, str], float] = defaultdict(float)
        self.awake = deque(range(len(self.ranks)))

    def to_the_end(self) -> None:
        while self.awake:
            index = self.awake.popleft()
            rank = self.ranks[index]
            while rank.position < len(rank.actions) and self._step(index, rank, rank.actions[rank.position]):
                rank.position += 1
        if any(rank.position < len(rank.actions) for rank in self.ranks):
            raise DeadlockError([rank.position for rank in self.ranks])

    def _step(self, index: int, rank: _Rank, action: Action) -> bool:
        """Runs one action; false where it has to wait for an event that has not happened."""
        if action.kind in COMPUTE:
            return self._compute(index, rank, action)
        if action.kind in SENDS:
            self.messages[message_of(action)].sent = rank.now
            self._move(index, action)
        elif action.kind in RECEIVES:
            self.messages[message_of(action)].posted = rank.now
            self._move(self.placement[peer_stage(action)], action)
        elif action.kind is ActionKind.REDUCE:
            end = rank.now + self.durations.of(action)
            rank.operations.append(Span(Lane.DP, str(action), rank.now, end))
            self._wait_until(rank, Span(Lane.DP, str(action), rank.now, end))
        else:
            return self._wait(rank, action, message_of(action))
        return True

    def _compute(self, index: int, rank: _Rank, action: Action) -> bool:
        source = producer(action, len(self.placement))
        if source is not None and self.placement[source.stage] == index:
            if source not in rank.done:
                return False
        elif source is not None and not self._wait(rank, action, output_of(source)):
            return False
        end = rank.now + self.durations.of(action)
        rank.compute.append(Span(Lane.COMPUTE, str(action), rank.now, end))
        rank.done[action] = rank.now = end
        return True

    def _wait(self, rank: _Rank, action: Action, key: MessageKey) -> bool:
        arrived = self.messages[key].arrived
        if arrived is None:
            return False
        self._wait_until(rank, Span(Lane.PP, str(action), rank.now, arrived, key=key))
        return True

    @staticmethod
    def _wait_until(rank: _Rank, wait: Span) -> None:
        if wait.end > rank.now:
            rank.waits.append(wait)
            rank.now = wait.end

    def _move(self, sender: int, action: Action) -> None:
        """Lets a message arrive once both ends take part."""
        key = message_of(action)
        message = self.messages[key]
        if message.sent is None or message.posted is None:
            return
        receiver = self.placement[peer_stage(action) if action.kind in SENDS else action.stage]
        way = (sender, receiver, key.direction)
        message.arrived = max(message.sent, message.posted, self.way_free[way]) + self.durations.p2p
        self.way_free[way] = message.arrived
        name = f"{key.direction}{key.stage}.{key.microbatch}"
        size = self.durations.message_bytes
        sent = Span(Lane.PP, f"S{name}", message.sent, message.arrived, size, key)
        self.ranks[sender].operations.append(sent)
        self.ranks[receiver].operations.append(Span(Lane.PP, f"R{name}", message.posted, message.arrived, 0, key))
        self.awake.extend((sender, receiver))
