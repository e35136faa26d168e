"""All channels of one rank, and the ledger and recorder that they share."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.comm.channel import Channel
from megatron_overlap.comm.pending import Ledger
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.process_groups import Group, ProcessGroups


@dataclass(frozen=True)
class Channels:
    """One channel per kind of traffic.

    `world`, `model_parallel` and `pipeline` carry scalars and small tables only, and are not recorded.
    """

    tp: Channel
    dp: Channel
    pp_forward: Channel
    pp_backward: Channel
    pipeline: Channel
    embedding: Channel
    model_parallel: Channel
    world: Channel
    ledger: Ledger
    recorder: Recorder


def open_channels(
    groups: ProcessGroups,
    recorder: Recorder,
    *,
    overlap: bool,
    overlap_tp: bool | None = None,
    deterministic: bool = False,
) -> Channels:
    """Channels over the groups; without `overlap` every collective is waited for where it is issued.

    `overlap_tp` decides for the tensor-parallel channel alone.
    """
    ledger = Ledger()
    unrecorded = Recorder(enabled=False)

    def channel(group: Group, lane: Lane, record_in: Recorder = recorder, *, blocking: bool = not overlap) -> Channel:
        return Channel(group, lane, ledger, record_in, blocking=blocking, deterministic=deterministic)

    return Channels(
        tp=channel(groups.tp, Lane.TP, blocking=not (overlap if overlap_tp is None else overlap_tp)),
        dp=channel(groups.dp, Lane.DP),
        pp_forward=channel(groups.pp_forward, Lane.PP),
        pp_backward=channel(groups.pp_backward, Lane.PP),
        pipeline=channel(groups.pipeline, Lane.PP, unrecorded),
        embedding=channel(groups.embedding, Lane.DP),
        model_parallel=channel(groups.model_parallel, Lane.DP, unrecorded),
        world=channel(groups.world, Lane.DP, unrecorded),
        ledger=ledger,
        recorder=recorder,
    )
