"""Compute orders: which forwards and backwards a pipeline rank runs, in which order.

Every order runs the microbatches of a stage in ascending order, forward and backward, so gradients are summed in one
order whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_overlap.schedule.actions import Action, ActionKind


def gpipe(stage: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards."""
    return one_forward_one_backward(stage, microbatches, warmup=microbatches)


def one_forward_one_backward(stage: int, microbatches: int, *, warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    forwards = [Action(ActionKind.FORWARD, stage, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(ActionKind.BACKWARD, stage, microbatch) for microbatch in range(microbatches)]
    return _alternate(forwards, backwards, warmup)


def plain_warmup(pp_rank: int, pp: int) -> int:
    """The least depth without stalls where messages take no time: p - 1 - s."""
    return pp - 1 - pp_rank


def eager_warmup(pp_rank: int, pp: int) -> int:
    """2 (p - 1 - s): each hop gets one more action to hide a message behind, for up to twice the stash."""
    return 2 * (pp - 1 - pp_rank)


def interleaved_1f1b(pp_rank: int, pp: int, virtual: int, *, microbatches: int, group_size: int) -> list[Action]:
    """1F1B over `virtual` stages of a rank, with Megatron's order and warm-up.

    Groups of `group_size` microbatches pass the first stage of the rank, then the second, and so on; backwards visit
    the stages of a rank in reverse. The warm-up is `interleaved_warmup`.
    """
    stages = range(pp_rank, pp * virtual, pp)
    forwards = _by_group(ActionKind.FORWARD, stages, microbatches, group_size)
    backwards = _by_group(ActionKind.BACKWARD, stages[::-1], microbatches, group_size)
    return _alternate(forwards, backwards, interleaved_warmup(pp_rank, pp, virtual, group_size=group_size))


def interleaved_warmup(pp_rank: int, pp: int, virtual: int, *, group_size: int) -> int:
    """2 (p - 1 - s) + (v - 1) N forwards."""
    return 2 * (pp - 1 - pp_rank) + (virtual - 1) * group_size


def is_legal_group_size(group_size: int, pp: int, microbatches: int) -> bool:
    """Whether every group, the last and possibly smaller one too, covers the length of the pipeline."""
    rest = microbatches % group_size if group_size > 0 else 0
    return pp <= group_size <= microbatches and (rest == 0 or rest >= pp)


def forward_only(pp_rank: int, pp: int, virtual: int, *, microbatches: int, group_size: int) -> list[Action]:
    """The forwards alone, for evaluation; any number of microbatches works."""
    return _by_group(ActionKind.FORWARD, range(pp_rank, pp * virtual, pp), microbatches, group_size)


def _by_group(kind: ActionKind, stages: Sequence[int], microbatches: int, group_size: int) -> list[Action]:
    return [
        Action(kind, stage, microbatch)
        for first in range(0, microbatches, group_size)
        for stage in stages
        for microbatch in range(first, min(first + group_size, microbatches))
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    assert warmup >= 0
    paired = len(forwards) - min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[paired:]]
