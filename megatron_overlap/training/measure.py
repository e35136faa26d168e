"""Communication figures of an interval, averaged over all ranks."""

from __future__ import annotations

import time

import torch

from megatron_overlap.comm import Channel, Channels
from megatron_overlap.schedule.actions import tag
from megatron_overlap.timeline.exposure import COMMUNICATION_LANES, KindSummary, send_times, summarize
from megatron_overlap.timeline.spans import Lane, MessageKey, Recording

_FIELDS = ("calls", "num_bytes", "busy_ms", "exposed_ms", "bubble_ms")
_CLOCK_ROUNDS = 5


class CommMeter:
    """Sums up one iteration after the other; all ranks call every method in the same order.

    Pipeline waits are split with the times at which the other stages issued their sends, exchanged once per iteration
    over the small `pipeline` channel after the step, and moved to this rank's clock.
    """

    def __init__(self, channels: Channels, *, num_stages: int, num_microbatches: int) -> None:
        self._channels = channels
        self._num_stages = num_stages
        self._num_messages = 2 * num_stages * num_microbatches
        self._clock = clock_offset(channels.pipeline)
        self._iterations = 0
        self._sums = torch.zeros(len(COMMUNICATION_LANES), len(_FIELDS), dtype=torch.float64)

    @property
    def clock_offset(self) -> float:
        """Seconds to add to this rank's clock to get that of the first pipeline rank."""
        return self._clock

    def end_iteration(self) -> Recording:
        """Take what the recorder holds as one iteration, and give it back."""
        recording = self._channels.recorder.take()
        summary = summarize(recording, self._send_times(recording))
        self._iterations += 1
        self._sums += torch.tensor(
            [[getattr(summary[lane], field) for field in _FIELDS] for lane in COMMUNICATION_LANES], dtype=torch.float64
        )
        return recording

    def take(self) -> dict[Lane, KindSummary]:
        """Mean per iteration and rank since the last call."""
        world = self._channels.world
        total = world.all_reduce(self._sums.to(world.device, copy=True), "metrics").wait().cpu()
        mean = total / (max(self._iterations, 1) * world.size)
        self._iterations = 0
        self._sums.zero_()
        return {
            lane: KindSummary(*(round(value) if index < 2 else value for index, value in enumerate(mean[row].tolist())))
            for row, lane in enumerate(COMMUNICATION_LANES)
        }

    def _send_times(self, recording: Recording) -> dict[MessageKey, float]:
        """When the messages of this recording were issued, on this rank's clock; every message has one sender."""
        pipeline = self._channels.pipeline
        if pipeline.size == 1:
            return {}
        table = torch.full((self._num_messages,), float("-inf"), dtype=torch.float64)
        for key, start in send_times(recording).items():
            table[tag(key, self._num_stages)] = start + self._clock
        times = pipeline.all_reduce(table.to(pipeline.device), "send_times", op="max").wait().tolist()
        keys = {span.key for span in (*recording.waits, *recording.operations) if span.key is not None}
        return {key: times[tag(key, self._num_stages)] - self._clock for key in keys}


def clock_offset(channel: Channel) -> float:
    """Seconds to add to this rank's clock to get that of the group's first rank.

    The first rank reads its clock after all have entered a meeting and before any of them hears of the reading; the
    quickest of some rounds bounds the error by half its length.
    """
    best, offset = float("inf"), 0.0
    for _ in range(_CLOCK_ROUNDS):
        channel.barrier("clock")
        before = time.perf_counter()
        channel.barrier("clock")
        reading = torch.tensor([time.perf_counter()], dtype=torch.float64, device=channel.device)
        told = float(channel.broadcast(reading, 0, "clock").wait())
        after = time.perf_counter()
        if after - before < best:
            best, offset = after - before, told - (before + after) / 2
    return 0.0 if channel.rank == 0 else offset
