"""Everything a run tells about its iterations: lines, metrics file, TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime

from megatron_overlap.timeline.files import TimelineFile
from megatron_overlap.training.build import Session
from megatron_overlap.training.measure import CommMeter
from megatron_overlap.training.memory import MemoryPeak
from megatron_overlap.training.progress import Progress
from megatron_overlap.training.report import (
    IntervalMeter,
    IterationStats,
    MetricsFile,
    TensorBoard,
    Workload,
    iteration_line,
    metrics_record,
    validation_lines,
)


class Logbook:
    """Collects on all ranks, writes on the last one, which knows the losses. All ranks call every method."""

    def __init__(self, session: Session) -> None:
        self._session = session
        options = session.config.logging
        self._workload = Workload.of(session.config, session.padded_vocab_size)
        self._meter = IntervalMeter()
        self._memory = MemoryPeak(session.device)
        self._comm: CommMeter | None = None
        self._timeline: TimelineFile | None = None
        if options.metrics_jsonl is not None or options.timeline_dir is not None:
            session.channels.recorder.enabled = True
            self._comm = CommMeter(
                session.channels,
                num_stages=session.layout.num_stages,
                num_microbatches=session.training_pass.num_microbatches,
            )
            if options.timeline_dir is not None:
                offset = self._comm.clock_offset
                self._timeline = TimelineFile(options.timeline_dir, session.rank, clock_offset=offset)
        writes = session.is_last_rank
        self._metrics = MetricsFile(options.metrics_jsonl) if writes and options.metrics_jsonl else None
        self._tensorboard = TensorBoard(options.tensorboard_dir) if writes and options.tensorboard_dir else None

    def add(self, stats: IterationStats) -> None:
        """Take in an iteration, and write where an interval ends."""
        if self._comm is not None:
            recording = self._comm.end_iteration()
            if self._timeline is not None and stats.iteration in self._session.config.logging.timeline_iters:
                self._timeline.write(stats.iteration, recording)
        self._meter.add(stats)
        if stats.iteration % self._session.config.logging.log_interval == 0:
            self.flush()

    def flush(self) -> None:
        """Write what has come since the last interval, if anything."""
        if not len(self._meter):
            return
        report = self._meter.flush()
        comm = self._comm.take() if self._comm is not None else {}
        if not self._session.is_last_rank:
            return
        config = self._session.config
        tflops = self._workload.tflops_per_device(report) if config.logging.log_throughput else None
        self._print(iteration_line(report, config.training.train_iters, now=datetime.now(), tflops_per_device=tflops))
        if self._metrics is not None:
            memory = self._memory.bytes()
            self._metrics.write(metrics_record(report, self._workload, memory_peak_bytes=memory, comm=comm))
        if self._tensorboard is not None:
            self._tensorboard.write_interval(report, self._workload)

    def add_validation(self, losses: Mapping[str, float], progress: Progress, on: str = "") -> None:
        """Write the losses of an evaluation; its communication is no part of any iteration."""
        self._session.channels.recorder.take()
        if not self._session.is_last_rank:
            return
        self._print(validation_lines(losses, progress.iteration, on))
        if self._tensorboard is not None:
            self._tensorboard.write_validation(losses, progress.iteration, progress.consumed_train_samples)

    def close(self) -> None:
        for sink in (self._metrics, self._tensorboard):
            if sink is not None:
                sink.close()

    @staticmethod
    def _print(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
