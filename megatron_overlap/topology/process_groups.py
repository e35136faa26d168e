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
        model_parallel=own(grid.model_parallel_groups(), "model_parallel"),
        # Last: only some ranks make it, and torch names a group by how many its members have made before.
        embedding=own(grid.embedding_groups(), "embedding"),
        world=Group(world, rank, backend, dist.group.WORLD if grid.world_size > 1 else None),
    )


def default_group_exists() -> bool:
    """Whether someone opened torch's default process group already."""
    return dist.is_available() and dist.is_initialized()


def connect_store(
    address: str, port: int, *, rank: int, world_size: int, agent_store: bool, attempt: int, timeout: timedelta
) -> dist.Store:
    """The store at which all ranks meet: rank 0 (or, with `agent_store`, the launcher) serves it.

    Keys of earlier attempts of a launcher are out of sight.
    """
    if world_size == 1:
        return dist.HashStore()
    store = dist.TCPStore(
        address,
        port,
        world_size=world_size,
        is_master=rank == 0 and not agent_store,
        timeout=timeout,
        multi_tenant=True,
    )
    return dist.PrefixStore(f"attempt_{attempt}", store)


def init_default_group(backend: str, store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Open torch's default process group; needed for one rank too."""
    prefixed = dist.PrefixStore("megatron_overlap/default", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=timeout)


def destroy_default_group() -> None:
    """Close every group of this process."""
    dist.destroy_process_group()
