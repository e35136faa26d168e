"""A plan: the checked action lists of all pipeline ranks for one layout and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_overlap.schedule import checks, compute_order, draw
from megatron_overlap.schedule.actions import (
    COMPUTE,
    Action,
    ActionKind,
    compute_only,
    looped_placement,
    message_of,
    peer_stage,
    tag,
)
from megatron_overlap.schedule.communication import P2PMode, add_communication
from megatron_overlap.schedule.simulate import unit_starts

MAX_SENDS = 2


class ScheduleKind(StrEnum):
    AUTO = "auto"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"

    @classmethod
    def _missing_(cls, value: object) -> ScheduleKind:
        raise ValueError(f"--pipeline-schedule {value}: not available; choose from {', '.join(cls)}")


class Warmup(StrEnum):
    """Forwards before the first backward of 1F1B; auto is eager where messages are hidden, else plain."""

    AUTO = "auto"
    PLAIN = "plain"
    EAGER = "eager"


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made from; `group_size` (interleaved only) defaults to `pp`."""

    pp: int
    microbatches: int
    virtual: int = 1
    schedule: ScheduleKind = ScheduleKind.AUTO
    warmup: Warmup = Warmup.AUTO
    group_size: int | None = None
    p2p: P2PMode = P2PMode.AHEAD
    forward_only: bool = False


@dataclass(frozen=True)
class Plan:
    """Action lists of all ranks; `request` has no auto left."""

    request: PlanRequest
    placement: tuple[int, ...]
    lists: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def actions(self, pp_rank: int) -> tuple[Action, ...]:
        return self.lists[pp_rank]

    def peer(self, action: Action) -> int:
        """Pipeline rank at the other end of a communication action."""
        return self.placement[peer_stage(action)]

    def tag(self, action: Action) -> int:
        """Tag of the message of a communication action, the same at both ends and unique within the step."""
        return tag(message_of(action), self.num_stages)

    def peak_stash(self, pp_rank: int) -> int:
        """Most microbatches that the rank holds between forward and backward."""
        return checks.peak_stash(self.lists[pp_rank])

    def peak_outstanding(self, pp_rank: int, kind: ActionKind) -> int:
        """Most sends or receives of a kind that the rank has in flight."""
        return checks.peak_outstanding(self.lists[pp_rank], kind)

    def grid_text(self, mark: tuple[int, int] | None = None) -> str:
        """The compute actions of all ranks in unit time; `mark` (pp_rank, index in its list) shows where one failed."""
        orders = [compute_only(actions) for actions in self.lists]
        starts = unit_starts(orders, self.placement)
        if mark is None:
            return draw.draw_grid(orders, starts)
        rank, index = mark
        num_before = sum(action.kind in COMPUTE for action in self.lists[rank][:index])
        cell = (rank, min(num_before, len(orders[rank]) - 1))
        return f"{draw.draw_grid(orders, starts, mark=cell)}\n{draw.draw_lists(self.lists, {rank: index})}"


def build_plan(request: PlanRequest) -> Plan:
    """The action lists for a request; ValueError names the flags where there is no such schedule."""
    request = _resolve(request)
    placement = looped_placement(request.pp, request.virtual)
    orders = [_compute_order(request, pp_rank) for pp_rank in range(request.pp)]
    two_apart = request.schedule is ScheduleKind.INTERLEAVED or request.warmup is Warmup.EAGER
    pairs = two_apart and request.schedule is not ScheduleKind.GPIPE
    lists = add_communication(orders, placement, request.p2p, max_sends=MAX_SENDS, pairs=pairs)
    if not request.forward_only:
        lists = [add_reductions(actions) for actions in lists]
    plan = Plan(request, placement, tuple(map(tuple, lists)))
    checks.check_lists(plan.lists, placement, request.microbatches, forward_only=request.forward_only)
    if not request.forward_only:
        checks.check_bounds(plan.lists, [_stash_bound(request, pp_rank) for pp_rank in range(request.pp)], MAX_SENDS)
    return plan


def add_reductions(actions: Sequence[Action]) -> list[Action]:
    """Reduces the gradients of every stage of a rank after everything else, in the order they became final."""
    last_backward = {action.stage: at for at, action in enumerate(actions) if action.kind is ActionKind.BACKWARD}
    stages = sorted(last_backward, key=lambda stage: last_backward[stage])
    return [*actions, *(Action(ActionKind.REDUCE, stage) for stage in stages)]


def _resolve(request: PlanRequest) -> PlanRequest:
    """Checks the numbers against each other and replaces what is auto or None."""
    assert request.pp >= 1, request
    assert request.virtual >= 1, request
    if request.microbatches < 1:
        raise ValueError(f"--global-batch-size gives {request.microbatches} microbatches; at least 1 is needed")
    kind = request.schedule
    if kind is ScheduleKind.AUTO:
        kind = ScheduleKind.INTERLEAVED if request.virtual > 1 else ScheduleKind.ONE_F_ONE_B
    if kind is ScheduleKind.INTERLEAVED and request.virtual == 1:
        raise ValueError(
            "--pipeline-schedule interleaved needs several stages on a rank: give "
            "--num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank"
        )
    if kind is not ScheduleKind.INTERLEAVED and request.virtual > 1:
        raise ValueError(
            f"--pipeline-schedule {kind} runs one stage on a rank, not {request.virtual}: use interleaved, or drop "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
        )
    warmup = request.warmup
    if warmup is Warmup.AUTO:
        warmup = Warmup.EAGER if request.p2p is P2PMode.AHEAD else Warmup.PLAIN
    group_size = request.pp if request.group_size is None else request.group_size
    if kind is ScheduleKind.INTERLEAVED and not request.forward_only:
        _check_group_size(group_size, request.pp, request.microbatches)
    return replace(request, schedule=kind, warmup=warmup, group_size=group_size)


def _check_group_size(group_size: int, pp: int, microbatches: int) -> None:
    if compute_order.is_legal_group_size(group_size, pp, microbatches):
        return
    legal = [size for size in range(pp, microbatches + 1) if compute_order.is_legal_group_size(size, pp, microbatches)]
    works = f" group sizes {legal} would work here;" if legal else ""
    fitting = max(microbatches // pp, 1) * pp
    raise ValueError(
        f"interleaving over --pipeline-model-parallel-size {pp} with groups of {group_size} microbatches "
        f"(--microbatch-group-size-per-virtual-pipeline-stage) cannot run {microbatches} microbatches "
        f"(--global-batch-size / (--micro-batch-size * data parallel size)): the group size must be at least {pp}, at "
        f"most {microbatches}, and leave a rest of 0 or at least {pp};{works} or change --global-batch-size to get "
        f"{fitting} or {fitting + pp} microbatches"
    )


def _warmup_depth(request: PlanRequest, pp_rank: int) -> int:
    """Forwards before the first backward of a rank, before it is capped by the number there is."""
    if request.schedule is ScheduleKind.GPIPE:
        return request.microbatches
    if request.schedule is ScheduleKind.INTERLEAVED:
        assert request.group_size is not None
        return compute_order.interleaved_warmup(pp_rank, request.pp, request.virtual, group_size=request.group_size)
    depth = compute_order.eager_warmup if request.warmup is Warmup.EAGER else compute_order.plain_warmup
    return depth(pp_rank, request.pp)


def _stash_bound(request: PlanRequest, pp_rank: int) -> int:
    """Microbatches between forward and backward: the warm-up, and one forward before the first backward."""
    return min(_warmup_depth(request, pp_rank) + 1, request.microbatches * request.virtual)


def _compute_order(request: PlanRequest, pp_rank: int) -> list[Action]:
    pp, virtual, microbatches, group_size = request.pp, request.virtual, request.microbatches, request.group_size
    assert group_size is not None
    if request.forward_only:
        return compute_order.forward_only(pp_rank, pp, virtual, microbatches=microbatches, group_size=group_size)
    if request.schedule is ScheduleKind.GPIPE:
        return compute_order.gpipe(pp_rank, microbatches)
    if request.schedule is ScheduleKind.ONE_F_ONE_B:
        warmup = _warmup_depth(request, pp_rank)
        return compute_order.one_forward_one_backward(pp_rank, microbatches, warmup=warmup)
    return compute_order.interleaved_1f1b(pp_rank, pp, virtual, microbatches=microbatches, group_size=group_size)
