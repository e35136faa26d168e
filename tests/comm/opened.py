"""Channels for tests, and values that every rank can work out for every other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_overlap.comm import Channel, Ledger
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.process_groups import Group


def open_channel(
    *,
    lane: Lane = Lane.TP,
    blocking: bool = False,
    deterministic: bool = False,
    recorder: Recorder | None = None,
    ledger: Ledger | None = None,
) -> Channel:
    """A channel over all ranks of a check."""
    size = dist.get_world_size()
    group = Group(tuple(range(size)), dist.get_rank(), "gloo", dist.group.WORLD if size > 1 else None)
    return Channel(
        group,
        lane,
        ledger or Ledger(),
        recorder or Recorder(enabled=False),
        blocking=blocking,
        deterministic=deterministic,
    )


def lone_channel(recorder: Recorder | None = None, *, size: int = 1) -> Channel:
    """A channel without a process group: of one rank, or of several for what ends before anything is sent."""
    return Channel(Group(tuple(range(size)), 0, "gloo"), Lane.PP, Ledger(), recorder or Recorder(enabled=False))


def value_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def uneven_value_of(rank: int, *shape: int) -> torch.Tensor:
    """Numbers of very different size, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(2000 + rank)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
