"""Properties of the communication pass over many settings, judged by a plain step-by-step run of the lists."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from megatron_overlap.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    WAITS_OF_RECEIVES,
    WAITS_OF_SENDS,
    Action,
    ActionKind,
    looped_placement,
    message_of,
    output_of,
    producer,
)
from megatron_overlap.schedule.checks import check_complete, check_messages, peak_outstanding
from megatron_overlap.schedule.communication import P2PMode, add_communication
from megatron_overlap.schedule.compute_order import (
    eager_warmup,
    forward_only,
    gpipe,
    interleaved_1f1b,
    is_legal_group_size,
    one_forward_one_backward,
    plain_warmup,
)
from megatron_overlap.timeline.spans import MessageKey

Orders = list[list[Action]]
MAX_SENDS = 2


class Judge:
    """Runs lists action by action; a send completes only when its receive has been posted."""

    def __init__(self, placement: Sequence[int]) -> None:
        self.placement = placement
        self.issued: set[MessageKey] = set()
        self.posted: set[MessageKey] = set()
        self.done: set[Action] = set()

    def run(self, rank: int, action: Action) -> bool:
        """False where the action has to wait."""
        if action.kind in SENDS:
            self.issued.add(message_of(action))
        elif action.kind in RECEIVES:
            self.posted.add(message_of(action))
        elif action.kind in COMPUTE:
            if not self.has_input(rank, action):
                return False
            self.done.add(action)
        else:
            return self.has_arrived(message_of(action))
        return True

    def has_input(self, rank: int, action: Action) -> bool:
        source = producer(action, len(self.placement))
        if source is None:
            return True
        return source in self.done if self.placement[source.stage] == rank else self.has_arrived(output_of(source))

    def has_arrived(self, key: MessageKey) -> bool:
        return key in self.issued and key in self.posted


def runs_to_the_end(lists: Sequence[Sequence[Action]], placement: Sequence[int]) -> bool:
    """Whether ranks that run in turn, each as far as it can, all finish."""
    judge = Judge(placement)
    positions = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while positions[rank] < len(actions) and judge.run(rank, actions[positions[rank]]):
                positions[rank] += 1
                moved = True
    return positions == [len(actions) for actions in lists]


def orders_of(kind: str, pp: int, virtual: int, microbatches: int, group_size: int) -> Orders:
    if kind == "gpipe":
        return [gpipe(rank, microbatches) for rank in range(pp)]
    if kind in ("plain", "eager"):
        depth = plain_warmup if kind == "plain" else eager_warmup
        return [one_forward_one_backward(rank, microbatches, warmup=depth(rank, pp)) for rank in range(pp)]
    if kind == "forward":
        return [forward_only(rank, pp, virtual, microbatches=microbatches, group_size=group_size) for rank in range(pp)]
    return [interleaved_1f1b(rank, pp, virtual, microbatches=microbatches, group_size=group_size) for rank in range(pp)]


def settings() -> Iterator[tuple[str, int, int, int, int]]:
    for pp in range(1, 9):
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33) if pp <= 4 else (1, 2, pp, pp + 1, 17):
            for kind in ("gpipe", "plain", "eager", "forward"):
                yield kind, pp, 1, microbatches, pp
        for virtual in (2, 3, 4):
            for microbatches in (1, 2, 3, pp, pp + 1, 2 * pp, 2 * pp + 1, 3 * pp):
                yield "forward", pp, virtual, microbatches, pp
                for group_size in {pp, pp + 1, 2 * pp, microbatches}:
                    if is_legal_group_size(group_size, pp, microbatches):
                        yield "interleaved", pp, virtual, microbatches, group_size


SETTINGS = list(settings())


def test_there_are_many_settings() -> None:
    assert len(SETTINGS) > 500


@pytest.mark.parametrize("mode", P2PMode)
@pytest.mark.parametrize("pp", range(1, 9))
def test_lists_are_complete_matched_and_run_to_the_end(pp: int, mode: P2PMode) -> None:
    for kind, _, virtual, microbatches, group_size in (setting for setting in SETTINGS if setting[1] == pp):
        placement = looped_placement(pp, virtual)
        orders = orders_of(kind, pp, virtual, microbatches, group_size)
        pairs = kind in ("eager", "interleaved")
        lists = add_communication(orders, placement, mode, max_sends=MAX_SENDS, pairs=pairs)
        where = (kind, pp, virtual, microbatches, group_size)
        check_complete(lists, placement, microbatches, forward_only=kind == "forward")
        check_messages(lists, placement)
        assert runs_to_the_end(lists, placement), where
        early = group_size - pp + pp // 2 if kind in ("interleaved", "forward") else 0
        for actions in lists:
            assert all(peak_outstanding(actions, send) <= MAX_SENDS for send in SENDS), where
            if mode is P2PMode.AHEAD:
                assert all(peak_outstanding(actions, receive) <= 2 + early for receive in RECEIVES), where


def test_one_rank_hands_over_without_messages() -> None:
    orders = orders_of("interleaved", 1, 3, 4, 1)
    assert add_communication(orders, looped_placement(1, 3), P2PMode.AHEAD) == orders


def in_flight_at_computes(actions: Sequence[Action]) -> list[int]:
    """Operations issued and not explicitly waited for whenever a compute starts."""
    open_now = 0
    seen = []
    for action in actions:
        if action.kind in COMPUTE:
            seen.append(open_now)
        elif action.kind in SENDS | RECEIVES:
            open_now += 1
        elif action.kind in WAITS_OF_SENDS | WAITS_OF_RECEIVES:
            open_now -= 1
    return [*seen, open_now]


@pytest.mark.parametrize("kind", ["plain", "interleaved", "gpipe", "eager"])
def test_blocking_leaves_nothing_in_flight_while_it_computes(kind: str) -> None:
    virtual = 2 if kind == "interleaved" else 1
    lists = add_communication(
        orders_of(kind, 4, virtual, 8, 4), looped_placement(4, virtual), P2PMode.BLOCKING, pairs=kind == "interleaved"
    )
    assert all(set(in_flight_at_computes(actions)) == {0} for actions in lists)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_ahead_posts_receives_that_many_computes_before_their_use(ahead: int) -> None:
    placement = looped_placement(4, 2)
    lists = add_communication(orders_of("interleaved", 4, 2, 8, 4), placement, P2PMode.AHEAD, ahead=ahead)
    assert runs_to_the_end(lists, placement)
    for actions in lists:
        posted: dict[object, int] = {}
        computes = 0
        for action in actions:
            if action.kind in RECEIVES:
                posted[message_of(action)] = computes
            if action.kind in COMPUTE:
                source = producer(action, 8)
                if source is not None and output_of(source) in posted:
                    assert computes - posted[output_of(source)] >= min(ahead, computes)
                computes += 1
        assert len(posted) > 8


def test_send_follows_its_compute_at_once_or_after_one_wait() -> None:
    lists = add_communication(orders_of("eager", 4, 1, 8, 4), looped_placement(4, 1), P2PMode.AHEAD)
    for actions in lists:
        for at, action in enumerate(actions):
            if action.kind in SENDS:
                between = actions[at - 1] if actions[at - 1].kind not in COMPUTE else None
                assert between is None or between.kind in WAITS_OF_SENDS
                assert actions[at - 1 if between is None else at - 2].kind in COMPUTE


def random_orders(placement: Sequence[int], microbatches: int, generator: random.Random) -> Orders:
    """Any order that can run: picks a random action whose input exists, until all have run."""
    num_stages = len(placement)
    pending = {
        Action(kind, stage, microbatch)
        for kind in COMPUTE
        for stage in range(num_stages)
        for microbatch in range(microbatches)
    }
    orders: Orders = [[] for _ in range(max(placement) + 1)]
    done: set[Action] = set()
    while pending:
        ready = [
            action
            for action in sorted(pending, key=str)
            if (source := producer(action, num_stages)) is None
            or (source in done and Action(ActionKind.FORWARD, action.stage, action.microbatch) in done | {action})
        ]
        action = generator.choice(ready)
        pending.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return orders


@pytest.mark.parametrize("mode", P2PMode)
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 2, 3, 0, 1, 2, 3), (0, 0, 1)])
def test_no_order_that_can_run_deadlocks(placement: tuple[int, ...], mode: P2PMode) -> None:
    generator = random.Random(17)
    for _ in range(15):
        orders = random_orders(placement, 3, generator)
        for max_sends in (1, 2):
            lists = add_communication(orders, placement, mode, ahead=generator.randint(0, 2), max_sends=max_sends)
            assert runs_to_the_end(lists, placement)


def test_the_judge_sees_a_deadlock() -> None:
    """Two ranks that each wait for their send before they post their receive."""
    placement = (0, 1, 0)
    lists = [
        [Action(ActionKind.FORWARD, 0), Action(ActionKind.SEND_FORWARD, 0), Action(ActionKind.WAIT_SEND_FORWARD, 0)],
        [Action(ActionKind.FORWARD, 1), Action(ActionKind.RECV_FORWARD, 1)],
    ]
    assert not runs_to_the_end(lists, placement)
