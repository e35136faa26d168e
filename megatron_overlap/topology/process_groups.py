"""The process groups of a grid, made once and passed on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_overlap.topology.grid import Grid


@dataclass(frozen=True)
class Group:
    """Some global ranks in order, the place of this process among them, and torch's handle (None for one rank)."""

    ranks: tuple[int, ...]
    rank: int
    backend: str
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class ProcessGroups:
    """One communicator per kind of traffic, so that no kind queues behind another inside one.

    `model_parallel`: tp x pp of one replica. `embedding`: first and last pipeline rank.
    `pipeline`: small exchanges among the stages of one replica, apart from activations and their gradients.
    """

    tp: Group
    dp: Group
    pp_forward: Group
    pp_backward: Group
    pipeline: Group
    embedding: Group
    model_parallel: Group
    world: Group


def make_process_groups(grid: Grid, timeout: timedelta) -> ProcessGroups:
    """Make this rank's groups; every rank of the default process group must call it, in the same order of kinds.

    Needs an initialised default process group of `grid.world_size` ranks.
    """
    rank = dist.get_rank()
    backend = str(dist.get_backend())

    def own(groups: list[list[int]], kind: str) -> Group:
        ranks = tuple(next((group for group in groups if rank in group), [rank]))
        handle = None
        if len(ranks) > 1:
            # Only members meet, so that the number of groups does not multiply the start-up time.
            handle = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=kind
            )
        return Group(ranks, ranks.index(rank), backend, handle)

    world = tuple(range(grid.world_size))
    pipeline_groups = grid.pp_groups()
    return ProcessGroups(
        tp=own(grid.tp_groups(), "tp"),
        dp=own(grid.dp_groups(), "dp"),
        pp_forward=own(pipeline_groups, "pp_forward"),
        pp_backward=own(pipeline_groups, "pp_backward"),
        pipeline=own(pipeline_groups, "pipeline"),
        embedding=own(grid.embedding_groups(), "embedding"),
        model_parallel=own(grid.model_parallel_groups(), "model_parallel"),
        world=Group(world, rank, backend, dist.group.WORLD if grid.world_size > 1 else None),
    )
