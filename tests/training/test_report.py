from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import datetime

import pytest

from megatron_overlap.config import parse_config
from megatron_overlap.timeline.exposure import KindSummary
from megatron_overlap.timeline.spans import Lane
from megatron_overlap.training.report import (
    IntervalMeter,
    IterationStats,
    MetricsFile,
    TensorBoard,
    Workload,
    flops_per_iteration,
    iteration_line,
    metrics_record,
    perplexity,
    validation_lines,
    with_digits,
)

NOW = datetime(2026, 1, 2, 3, 4, 5)
WORKLOAD = Workload(flops_per_sample=1e9, seq_length=32, world_size=2)


def config_of(*flags):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    rest = "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3 --mock-data"
    tokens = "--tokenizer-type NullTokenizer --vocab-size 127 --distributed-backend gloo"
    return parse_config([*shape.split(), *rest.split(), *tokens.split(), *flags], world_size=1).config


def stats(iteration, seconds=0.5, loss=4.0, **changes):
    one = IterationStats(
        iteration=iteration,
        seconds=seconds,
        batch_size=8,
        consumed_samples=8 * iteration,
        learning_rate=1e-3,
        losses={"lm loss": loss},
        grad_norm=1.5,
    )
    return replace(one, **changes)


def report_of(*added):
    meter = IntervalMeter()
    for one in added:
        meter.add(one)
    return meter.flush()


def line_of(*added, **options):
    return iteration_line(report_of(*added), 500, now=NOW, **options)


def number_after(label, line):
    """How users' scripts read the line: split at the bars, match the label."""
    (part,) = [part for part in line.split("|") if re.search(re.escape(label) + r":?\s+[-+.\dE]+\s*$", part)]
    return float(part.split(":")[-1])


def test_flops_of_grouped_queries_gated_mlp_and_free_ffn_size():
    gated = config_of("--swiglu", "--ffn-hidden-size", "160", "--group-query-attention", "--num-query-groups", "2")
    assert flops_per_iteration(gated.model, 128, 4) == 75_497_472


def test_flops_follow_the_head_width_and_the_plain_mlp():
    plain, wide = config_of().model, config_of("--kv-channels", "32").model
    tokens = 4 * 32
    weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 128
    assert flops_per_iteration(plain, 128, 4) == 6 * tokens * weights + 6 * tokens * 2 * 64 * 32
    more = 2 * 4 * 64 * 64
    assert flops_per_iteration(wide, 128, 4) - flops_per_iteration(plain, 128, 4) == 6 * tokens * (more + 2 * 64 * 32)


def test_the_line_to_the_letter():
    line = line_of(stats(10), tflops_per_device=123.44)
    assert line == (
        " [2026-01-02 03:04:05] iteration       10/     500 | consumed samples:           80 |"
        " elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 123.4 |"
        " learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 4.000000E+00 | loss scale: 1.0 |"
        " grad norm: 1.500 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_fields_that_come_and_go():
    assert "throughput" not in line_of(stats(1))
    assert "grad norm" not in line_of(stats(1, grad_norm=None))
    assert "| skipped samples:           16 | elapsed" in line_of(stats(1), skipped_samples=16)
    both = line_of(stats(1, losses={"lm loss": 4.0, "aux loss": 0.5}))
    assert "| lm loss: 4.000000E+00 | aux loss: 5.000000E-01 | loss scale" in both


@pytest.mark.parametrize("loss", [math.nan, 0.0, -1.0, -math.inf])
def test_a_loss_that_is_not_above_zero_is_left_out(loss):
    assert "lm loss" not in line_of(stats(1, loss=loss))


def test_one_line_is_one_span_of_time():
    added = [stats(1, 0.5), stats(2, 1.5, loss=2.0, grad_norm=0.5, learning_rate=2e-3)]
    report = report_of(*added)
    line = line_of(*added, tflops_per_device=WORKLOAD.tflops_per_device(report))
    assert number_after("elapsed time per iteration (ms)", line) == 1000
    assert number_after("lm loss", line) == 3.0
    assert number_after("grad norm", line) == 1.0
    assert number_after("learning rate", line) == 2e-3
    assert number_after("consumed samples", line) == 16
    seconds = number_after("elapsed time per iteration (ms)", line) / 1e3
    tflops = number_after("throughput per GPU (TFLOP/s/GPU)", line)
    assert tflops * 1e12 * seconds * WORKLOAD.world_size == pytest.approx(8 * WORKLOAD.flops_per_sample, rel=1e-3)
    assert WORKLOAD.tokens_per_s(report) * seconds == pytest.approx(8 * 32)


def test_the_last_short_interval_is_divided_by_its_own_count():
    meter = IntervalMeter()
    lines = []
    for iteration in range(1, 8):
        meter.add(stats(iteration, seconds=1.1 if iteration == 5 else 0.1, loss=float(iteration)))
        if iteration % 3 == 0 or iteration == 7:
            lines.append(meter.flush())
    assert len(meter) == 0
    assert [line.num_iterations for line in lines] == [3, 3, 1]
    assert [line.seconds_per_iteration for line in lines] == pytest.approx([0.1, 1.3 / 3, 0.1])
    assert [line.losses["lm loss"] for line in lines] == [2.0, 5.0, 7.0]
    assert [line.samples_per_s * line.seconds_per_iteration for line in lines] == pytest.approx([8, 8, 8])


def test_skipped_iterations_count_in_time_only():
    report = report_of(
        stats(1), stats(2, loss=math.nan, grad_norm=math.inf, skipped=True), stats(3, loss=9.0, skipped=True)
    )
    assert (report.num_skipped, report.num_nan) == (2, 1)
    assert report.losses == {"lm loss": 4.0}
    assert report.grad_norm == 1.5
    assert report.seconds_per_iteration == 0.5


def test_all_iterations_skipped():
    report = report_of(stats(1, loss=math.nan, skipped=True))
    assert (report.losses, report.grad_norm) == ({}, None)
    line = iteration_line(report, 5, now=NOW)
    assert "lm loss" not in line
    assert line.endswith(" number of skipped iterations:   1 | number of nan iterations:   1 |")
    assert metrics_record(report, WORKLOAD, memory_peak_bytes=0, comm={})["lm_loss"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0"), (1234.56, "1234.6"), (123.44, "123.4"), (12.344, "12.34"), (0.00012344, "0.0001234")],
)
def test_small_throughput_has_digits_and_no_exponent(value, text):
    assert with_digits(value) == text
    pattern = r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d+)"
    found = re.search(pattern, line_of(stats(1), tflops_per_device=value))
    assert float(found[1]) == pytest.approx(value, rel=1e-3)


def test_unit_is_tera_per_device():
    report = report_of(stats(1, seconds=2.0))
    assert WORKLOAD.tflops_per_device(report) == pytest.approx(8 * 1e9 / 2.0 / 2 / 1e12)
    config = config_of()
    workload = Workload.of(config, 128)
    assert workload.flops_per_sample * 4 == flops_per_iteration(config.model, 128, 4)
    assert (workload.seq_length, workload.world_size) == (32, 1)


def test_validation_lines():
    frame, line, below = validation_lines({"lm loss": 2.0}, 40).split("\n")
    expected = f" validation loss at iteration 40 | lm loss value: 2.000000E+00 | lm loss PPL: {math.exp(2):.6E} | "
    assert line == expected
    assert frame == below == "-" * (len(line) + 1)
    assert " validation loss at iteration 40 on test set | " in validation_lines({"lm loss": 2.0}, 40, "test set")
    assert perplexity(25.0) == math.exp(20)


def test_metrics_have_the_documented_fields(tmp_path):
    comm = {lane: KindSummary(3, 4096, 2.0, 0.5, 0.25) for lane in (Lane.TP, Lane.PP, Lane.DP)}
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    for iteration in (1, 2):
        file.write(metrics_record(report_of(stats(iteration)), WORKLOAD, memory_peak_bytes=7, comm=comm))
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == iteration
    file.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert ", ".join(record) == (
        "iteration, consumed_samples, consumed_tokens, lm_loss, grad_norm, learning_rate, loss_scale, iteration_ms, "
        "tokens_per_s, tflops_per_device, memory_peak_bytes, comm"
    )
    assert (record["iteration"], record["consumed_tokens"], record["lm_loss"]) == (2, 16 * 32, 4.0)
    assert (record["iteration_ms"], record["tokens_per_s"], record["memory_peak_bytes"]) == (500.0, 512.0, 7)
    plain = {"calls": 3, "bytes": 4096, "busy_ms": 2.0, "exposed_ms": 0.5}
    assert record["comm"] == {"tp": plain, "pp": plain | {"bubble_ms": 0.25}, "dp": plain}


def test_metrics_stay_json_when_the_loss_is_not_a_number(tmp_path):
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    file.write(metrics_record(report_of(stats(1, loss=math.nan)), WORKLOAD, memory_peak_bytes=0, comm={}))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["lm_loss"] is None


def test_a_metrics_file_that_cannot_be_opened_names_the_flag(tmp_path):
    with pytest.raises(ValueError, match=r"--metrics-jsonl .*missing.*No such file"):
        MetricsFile(str(tmp_path / "missing" / "metrics.jsonl"))


def test_tensorboard_has_the_tags_that_users_know(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(str(tmp_path))
    board.write_interval(report_of(stats(3)), WORKLOAD)
    board.write_validation({"lm loss": 2.0}, 3, 24)
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (loss,), (by_samples,) = events.Scalars("lm loss"), events.Scalars("lm loss vs samples")
    assert (loss.step, loss.value, by_samples.step) == (3, 4.0, 24)
    (perplexity_event,) = events.Scalars("lm loss validation ppl")
    assert perplexity_event.value == pytest.approx(math.exp(2.0))
    tags = {"learning-rate", "batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput", "world-size"}
    assert tags | {"lm loss validation"} <= set(events.Tags()["scalars"])
