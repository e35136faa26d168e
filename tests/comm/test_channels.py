"""The channels of a rank: which ranks each reaches, and which of them wait at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.comm import Channel, Channels, open_channels
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.grid import Grid
from megatron_overlap.topology.process_groups import Group, ProcessGroups, make_process_groups
from tests.ranks import run_ranks

LONE = Group((0,), 0, "gloo")
LONE_GROUPS = ProcessGroups(**{field.name: LONE for field in fields(ProcessGroups)})
KINDS = [field.name for field in fields(Channels) if field.type == "Channel"]
GRIDS = [Grid(2, 2, 1), Grid(2, 1, 2), Grid(1, 2, 2), Grid(1, 2, 2, "tp-pp-dp"), Grid(1, 4, 1), Grid(4, 1, 1)]


def _blocking(channels: Channels) -> Mapping[str, bool]:
    return {kind: getattr(channels, kind).blocking for kind in KINDS}


@pytest.mark.parametrize(
    ("overlap", "overlap_tp", "blocking"),
    [
        (True, None, set()),
        (True, False, {"tp"}),
        (False, None, set(KINDS)),
        (False, False, set(KINDS)),
    ],
)
def test_overlap_decides_what_waits_at_once(overlap: bool, overlap_tp: bool | None, blocking: set[str]) -> None:
    channels = open_channels(LONE_GROUPS, Recorder(), overlap=overlap, overlap_tp=overlap_tp)
    assert {kind for kind, waits in _blocking(channels).items() if waits} == blocking
    assert {kind: getattr(channels, kind).lane for kind in ("tp", "dp", "pp_forward", "pp_backward")} == {
        "tp": Lane.TP,
        "dp": Lane.DP,
        "pp_forward": Lane.PP,
        "pp_backward": Lane.PP,
    }


def check_reach(grid: Grid) -> Mapping[str, tuple[int, ...]]:
    """Gather the global ranks over every channel, all at once."""
    recorder = Recorder(enabled=True)
    channels = open_channels(make_process_groups(grid, timedelta(seconds=30)), recorder, overlap=True)
    own = torch.tensor([dist.get_rank()])
    pendings = {kind: getattr(channels, kind).all_gather(own, kind) for kind in KINDS}
    reached = {}
    for kind, pending in pendings.items():
        channel: Channel = getattr(channels, kind)
        reached[kind] = tuple(pending.wait().tolist())
        assert reached[kind][channel.rank] == dist.get_rank(), kind
        assert channel.group.ranks == reached[kind], kind
    channels.ledger.assert_empty()
    recorded = {span.name for span in recorder.take().operations}
    assert recorded.isdisjoint({"world", "model_parallel", "pipeline"})
    assert recorded == {
        kind for kind in ("tp", "dp", "pp_forward", "pp_backward", "embedding") if len(reached[kind]) > 1
    }
    return reached


@pytest.mark.ranks
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_channels_reach_the_ranks_of_the_grid(grid: Grid) -> None:
    for rank, reached in enumerate(run_ranks(grid.world_size, check_reach, (grid,), shim="late")):
        at = grid.coordinates(rank)
        pipeline = tuple(grid.rank(tp=at.tp, dp=at.dp, pp=pp) for pp in range(grid.pp))
        assert reached == {
            "tp": tuple(grid.rank(tp=tp, dp=at.dp, pp=at.pp) for tp in range(grid.tp)),
            "dp": tuple(grid.rank(tp=at.tp, dp=dp, pp=at.pp) for dp in range(grid.dp)),
            "pp_forward": pipeline,
            "pp_backward": pipeline,
            "pipeline": pipeline,
            "embedding": (pipeline[0], pipeline[-1])
            if rank in (pipeline[0], pipeline[-1]) and grid.pp > 1
            else (rank,),
            "model_parallel": tuple(
                sorted(grid.rank(tp=tp, dp=at.dp, pp=pp) for tp in range(grid.tp) for pp in range(grid.pp))
            ),
            "world": tuple(range(grid.world_size)),
        }
