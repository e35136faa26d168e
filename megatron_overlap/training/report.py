"""What a run tells about its iterations: log lines, metrics records, TensorBoard.

meter.add(stats)                    after every iteration
report = meter.flush()              every --log-interval iterations, and at the end: one span of time for all figures
iteration_line(report, ...)         the line that Megatron-LM prints
metrics_record(report, ...)         the object of --metrics-jsonl
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron_overlap.config import Config, ModelConfig
from megatron_overlap.timeline.exposure import KindSummary
from megatron_overlap.timeline.spans import Lane

LM_LOSS = "lm loss"
_MAX_EXPONENT = 20.0


def flops_per_iteration(model: ModelConfig, padded_vocab_size: int, batch_size: int) -> int:
    """Floating-point operations of one iteration over all ranks.

    6 per weight and token (multiply and add; forward, input gradient, weight gradient), the attention core with the
    causal half of its square only. Embedding lookup, norms and recomputation are not counted.
    """
    query = model.kv_channels * model.num_attention_heads
    key_value = model.kv_channels * model.num_query_groups
    attention = model.hidden_size * (query + 2 * key_value) + query * model.hidden_size
    mlp = (3 if model.swiglu else 2) * model.hidden_size * model.ffn_hidden_size
    weights = model.num_layers * (attention + mlp) + model.hidden_size * padded_vocab_size
    tokens = batch_size * model.seq_length
    return 6 * tokens * weights + 6 * tokens * model.num_layers * query * model.seq_length


@dataclass(frozen=True)
class IterationStats:
    """One iteration, the same on all ranks. `consumed_samples` and `learning_rate` are those after it.

    `losses`: means over its tokens by name, `lm loss` first. `skipped`: the weights were not changed.
    """

    iteration: int
    seconds: float
    batch_size: int
    consumed_samples: int
    learning_rate: float
    losses: Mapping[str, float]
    grad_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False


@dataclass(frozen=True)
class IntervalReport:
    """Means over the iterations since the last report; counters and the learning rate are those after the last one.

    `losses` and `grad_norm` leave out skipped iterations. `num_nan`: skipped ones with a loss that is not finite.
    """

    iteration: int
    num_iterations: int
    seconds_per_iteration: float
    samples_per_iteration: float
    consumed_samples: int
    learning_rate: float
    losses: Mapping[str, float]
    grad_norm: float | None
    loss_scale: float
    num_skipped: int
    num_nan: int

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_iteration / self.seconds_per_iteration


@dataclass
class IntervalMeter:
    """Collects iterations until they are reported."""

    _stats: list[IterationStats] = field(default_factory=list)

    def add(self, stats: IterationStats) -> None:
        self._stats.append(stats)

    def __len__(self) -> int:
        return len(self._stats)

    def flush(self) -> IntervalReport:
        """The report of what was added since the last one, at least one iteration; the next one starts empty."""
        stats, self._stats = self._stats, []
        assert stats, "a report needs at least one iteration"
        last, done = stats[-1], [one for one in stats if not one.skipped]
        names = dict.fromkeys(name for one in done for name in one.losses)
        return IntervalReport(
            iteration=last.iteration,
            num_iterations=len(stats),
            seconds_per_iteration=_mean(one.seconds for one in stats),
            samples_per_iteration=_mean(one.batch_size for one in stats),
            consumed_samples=last.consumed_samples,
            learning_rate=last.learning_rate,
            losses={name: _mean(one.losses[name] for one in done if name in one.losses) for name in names},
            grad_norm=_mean_or_none(one.grad_norm for one in done if one.grad_norm is not None),
            loss_scale=last.loss_scale,
            num_skipped=len(stats) - len(done),
            num_nan=sum(not all(map(math.isfinite, one.losses.values())) for one in stats if one.skipped),
        )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if all(map(math.isfinite, listed)) else math.nan


def _mean_or_none(values: Iterable[float]) -> float | None:
    listed = list(values)
    return _mean(listed) if listed else None


@dataclass(frozen=True)
class Workload:
    """What turns seconds into throughput."""

    flops_per_sample: float
    seq_length: int
    world_size: int

    @classmethod
    def of(cls, config: Config, padded_vocab_size: int) -> Workload:
        return cls(
            flops_per_sample=flops_per_iteration(config.model, padded_vocab_size, batch_size=1),
            seq_length=config.model.seq_length,
            world_size=config.parallel.world_size,
        )

    def tokens_per_s(self, report: IntervalReport) -> float:
        """Of all ranks together."""
        return report.samples_per_s * self.seq_length

    def tflops_per_device(self, report: IntervalReport) -> float:
        """TFLOP/s of one rank."""
        return report.samples_per_s * self.flops_per_sample / (self.world_size * 1e12)


def iteration_line(
    report: IntervalReport,
    train_iters: int,
    *,
    now: datetime,
    tflops_per_device: float | None = None,
    skipped_samples: int = 0,
) -> str:
    """The line that users' scripts parse; fields are those of Megatron-LM, in its order.

    The throughput is there with --log-throughput; a loss is left out when it is not above 0, so when it is NaN.
    """
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {report.iteration:8d}/{train_iters:8d}",
        f" consumed samples: {report.consumed_samples:12d}",
    ]
    if skipped_samples > 0:
        fields.append(f" skipped samples: {skipped_samples:12d}")
    fields.append(f" elapsed time per iteration (ms): {report.seconds_per_iteration * 1e3:.1f}")
    if tflops_per_device is not None:
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {with_digits(tflops_per_device)}")
    fields.append(f" learning rate: {report.learning_rate:.6E}")
    fields.append(f" global batch size: {round(report.samples_per_iteration):5d}")
    fields += [f" {name}: {value:.6E}" for name, value in report.losses.items() if value > 0]
    fields.append(f" loss scale: {report.loss_scale:.1f}")
    if report.grad_norm is not None:
        fields.append(f" grad norm: {report.grad_norm:.3f}")
    fields.append(f" number of skipped iterations: {report.num_skipped:3d}")
    fields.append(f" number of nan iterations: {report.num_nan:3d}")
    return "".join(f"{text} |" for text in fields)


def with_digits(value: float, digits: int = 4) -> str:
    """One decimal, or as many as show `digits` digits of a small value; never with an exponent."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:.1f}"
    return f"{value:.{max(1, digits - 1 - math.floor(math.log10(value)))}f}"


def validation_lines(losses: Mapping[str, float], iteration: int, on: str = "") -> str:
    """The framed line of an evaluation; `on` is `validation set` or `test set` at the end of a run."""
    place = f"iteration {iteration}" + (f" on {on}" if on else "")
    parts = [f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | " for name, value in losses.items()]
    line = f" validation loss at {place} | {''.join(parts)}"
    frame = "-" * (len(line) + 1)
    return f"{frame}\n{line}\n{frame}"


def perplexity(loss: float) -> float:
    """exp(loss), with the loss cut at 20."""
    return math.exp(min(_MAX_EXPONENT, loss))


def metrics_record(
    report: IntervalReport,
    workload: Workload,
    *,
    memory_peak_bytes: int,
    comm: Mapping[Lane, KindSummary],
) -> dict[str, Any]:
    """The object of --metrics-jsonl. Values that are not finite are null, since JSON has no NaN."""
    record = {
        "iteration": report.iteration,
        "consumed_samples": report.consumed_samples,
        "consumed_tokens": report.consumed_samples * workload.seq_length,
        "lm_loss": report.losses.get(LM_LOSS),
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "loss_scale": report.loss_scale,
        "iteration_ms": report.seconds_per_iteration * 1e3,
        "tokens_per_s": workload.tokens_per_s(report),
        "tflops_per_device": workload.tflops_per_device(report),
        "memory_peak_bytes": memory_peak_bytes,
        "comm": {lane.value: _comm_record(lane, comm.get(lane, KindSummary())) for lane in (Lane.TP, Lane.PP, Lane.DP)},
    }
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}


def _comm_record(lane: Lane, summary: KindSummary) -> dict[str, float]:
    record = {
        "calls": summary.calls,
        "bytes": summary.num_bytes,
        "busy_ms": summary.busy_ms,
        "exposed_ms": summary.exposed_ms,
    }
    return record | {"bubble_ms": summary.bubble_ms} if lane is Lane.PP else record


class MetricsFile:
    """Appends one JSON line per record; every line is in the file when `write` returns."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        except OSError as error:
            raise ValueError(f"--metrics-jsonl {path} cannot be written: {error.strerror}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(f"--metrics-jsonl {self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars under the tags that Megatron-LM uses, by iteration and for most also by consumed samples."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"--tensorboard-dir needs the package tensorboard: {error}") from error
        try:
            self._writer = SummaryWriter(log_dir=directory)
        except OSError as error:
            raise ValueError(f"--tensorboard-dir {directory} cannot be written: {error.strerror}") from error

    def write_interval(self, report: IntervalReport, workload: Workload) -> None:
        by_both = {
            "learning-rate": report.learning_rate,
            "batch-size": report.samples_per_iteration,
            **report.losses,
            "loss-scale": report.loss_scale,
            "grad-norm": report.grad_norm,
            "iteration-time": report.seconds_per_iteration,
            "throughput": workload.tflops_per_device(report),
        }
        for tag, value in by_both.items():
            if value is not None:
                self._writer.add_scalar(tag, value, report.iteration)
                self._writer.add_scalar(f"{tag} vs samples", value, report.consumed_samples)
        self._writer.add_scalar("world-size", workload.world_size, report.iteration)
        self._writer.flush()

    def write_validation(self, losses: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        for name, value in losses.items():
            for tag, number in ((f"{name} validation", value), (f"{name} validation ppl", perplexity(value))):
                self._writer.add_scalar(tag, number, iteration)
                self._writer.add_scalar(f"{tag} vs samples", number, consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
