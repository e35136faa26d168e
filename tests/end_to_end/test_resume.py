"""A resumed run is the run that was not stopped: bit for bit at its layout, to rounding at any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.end_to_end.runs import (
    GRID,
    INTERLEAVED,
    SEQUENCE_PARALLEL,
    SHARDED,
    Layout,
    assert_same_bits,
    flags_of,
    grad_norms,
    losses,
    named,
    read_checkpoint,
    run,
    run_fresh,
    validation_losses,
)
from tests.ranks import ROOT, RankError, Training, free_port

pytestmark = pytest.mark.ranks

# Dropout, warm-up, decay and clipping all act; ten iterations, stopped after five.
WHOLE = (
    "--train-iters 10 --hidden-dropout 0.1 --attention-dropout 0.1 --lr-decay-style cosine --lr-warmup-iters 2"
    " --min-lr 1e-5 --clip-grad 0.5"
)
FIRST_HALF = "--exit-interval 5"
LINE = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "loss_scale")

SAMPLE = [
    (Layout(), ""),
    (Layout(tp=2, flags=SEQUENCE_PARALLEL), ""),
    (Layout(pp=2, flags=INTERLEAVED), "--overlap off"),
    (Layout(dp=2, flags=SHARDED), "--bf16"),
]
REST = [
    (layout, f"{overlap} {kind}") for layout in GRID for overlap in ("", "--overlap off") for kind in ("", "--bf16")
]


def _save(folder: Path) -> str:
    return f"--save {folder} --save-interval 100"


def _lines(training: Training) -> list[list[float]]:
    return [[line[key] for key in LINE] for line in training.metrics]


@pytest.mark.parametrize(
    ("layout", "flags"),
    [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.campaign) for each in REST)],
    ids=lambda value: str(value).replace(" ", "_") or "plain",
)
def test_resuming_repeats_the_unstopped_run(layout: Layout, flags: str, tmp_path: Path) -> None:
    whole_folder, half_folder = tmp_path / "whole", tmp_path / "half"
    whole = run_fresh(layout, WHOLE, flags, _save(whole_folder))
    first = run_fresh(layout, WHOLE, flags, FIRST_HALF, _save(half_folder))
    second = run_fresh(layout, WHOLE, flags, _save(half_folder), f"--load {half_folder}")
    assert len(first.metrics) == len(second.metrics) == 5
    assert _lines(first) + _lines(second) == _lines(whole)
    expected, found = (read_checkpoint(folder) for folder in (whole_folder, half_folder))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in expected)


CHANGES = [
    (Layout(tp=2, pp=2, flags=INTERLEAVED), Layout(dp=2, flags=SHARDED)),
    (Layout(dp=2, flags=SHARDED), Layout(tp=2, flags=SEQUENCE_PARALLEL)),
    (Layout(pp=2), Layout(tp=4)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *CHANGES,
        *(
            pytest.param(one, other, marks=pytest.mark.campaign)
            for one in (Layout(), Layout(tp=2, pp=2), Layout(dp=2, flags=SHARDED))
            for other in GRID
        ),
    ],
    ids=str,
)
def test_another_layout_goes_on_with_the_same_losses(before: Layout, after: Layout, tmp_path: Path) -> None:
    whole = run(before, WHOLE)
    run_fresh(before, WHOLE, FIRST_HALF, _save(tmp_path))
    second = run_fresh(after, WHOLE, f"--load {tmp_path}")
    assert losses(second) == pytest.approx(losses(whole)[5:], rel=1e-5, abs=0)
    assert grad_norms(second) == pytest.approx(grad_norms(whole)[5:], rel=1e-4, abs=0)
    assert [line["consumed_samples"] for line in second.metrics] == [48, 56, 64, 72, 80]


def test_another_micro_batch_size_reads_the_same_samples(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, FIRST_HALF, _save(tmp_path))
    second = run_fresh(Layout(), WHOLE, f"--load {tmp_path} --micro-batch-size 4")
    # All samples have as many tokens, so the mean over microbatches does not depend on their size.
    assert losses(second) == pytest.approx(losses(run(Layout(), WHOLE))[5:], rel=1e-5, abs=0)


def test_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    evaluate = "--split 80,10,10 --eval-interval 2 --eval-iters 2"
    whole = run_fresh(Layout(), WHOLE, evaluate)
    run_fresh(Layout(), WHOLE, evaluate, FIRST_HALF, _save(tmp_path))
    second = run_fresh(Layout(), WHOLE, evaluate, f"--load {tmp_path}")
    assert validation_losses(second) == validation_losses(whole)[2:]


def test_new_learning_rates_need_a_decision(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, FIRST_HALF, _save(tmp_path))
    changed = f"--load {tmp_path} --lr 1e-4 --min-lr 1e-6"
    with pytest.raises(RankError) as failed:
        run_fresh(Layout(), WHOLE, changed)
    for words in ("--lr is 0.0001", "0.001", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        assert words in str(failed.value)
    override = run_fresh(Layout(), WHOLE, changed, "--override-opt_param-scheduler")
    assert all(line["learning_rate"] <= 1e-4 for line in override.metrics)
    kept = run_fresh(Layout(), WHOLE, changed, "--use-checkpoint-opt_param-scheduler")
    assert_same_bits(kept, run_fresh(Layout(), WHOLE, f"--load {tmp_path}"))


def test_more_iterations_than_planned(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, _save(tmp_path))
    longer = f"--load {tmp_path} --train-iters 12"
    with pytest.raises(RankError, match="--override-opt_param-scheduler"):
        run_fresh(Layout(), WHOLE, longer)
    for way_out in ("--override-opt_param-scheduler", "--lr-decay-iters 10"):
        resumed = run_fresh(Layout(), WHOLE, longer, way_out)
        assert [line["iteration"] for line in resumed.metrics] == [11, 12]
        assert resumed.metrics[-1]["consumed_samples"] == 96


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, _save(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    again = run_fresh(Layout(), WHOLE, f"--save {tmp_path} --save-interval 3 --load {tmp_path}")
    assert again.metrics == []
    assert "nothing left to do" in again.stdout[0]
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before


def test_nothing_to_load_is_said(tmp_path: Path) -> None:
    empty = run_fresh(Layout(), f"--load {tmp_path}")
    assert "WARNING: could not find the metadata file" in empty.stdout[0]
    assert str(tmp_path) in empty.stdout[0]
    first_start = run_fresh(Layout(), f"--load {tmp_path} {_save(tmp_path)}")
    assert "WARNING" not in first_start.stdout[0]
    assert "starting from random weights" in first_start.stdout[0]


def test_finetuning_takes_the_weights_only(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, _save(tmp_path))
    tuned = run_fresh(Layout(pp=2), f"--load {tmp_path} --finetune --train-iters 1")
    assert tuned.metrics[0]["iteration"] == 1
    assert tuned.metrics[0]["consumed_samples"] == 8
    assert losses(tuned)[0] < losses(run(Layout(), WHOLE))[0]


def test_a_model_that_does_not_fit_is_told_by_flag(tmp_path: Path) -> None:
    run_fresh(Layout(), WHOLE, _save(tmp_path))
    with pytest.raises(RankError) as failed:
        run_fresh(Layout(), WHOLE, f"--load {tmp_path} --num-layers 6 --normalization RMSNorm")
    for words in ("--num-layers: the checkpoint has 4, given is 6", "--normalization: the checkpoint has LayerNorm"):
        assert words in str(failed.value)


@pytest.mark.parametrize("tries", [2, pytest.param(20, marks=pytest.mark.campaign)])
def test_a_run_killed_at_any_time_goes_on(tries: int, tmp_path: Path) -> None:
    """Every iteration saves, so most kills hit a save; the run that was killed again and again ends like any other."""
    save = f"--save {tmp_path} --save-interval 1 --load {tmp_path}"
    for number in range(tries):
        _run_and_kill(flags_of(WHOLE, save, "--use-distributed-optimizer"), after=0.05 + 0.13 * (number % 7))
    end = run_fresh(Layout(dp=2, flags=SHARDED), WHOLE, save)
    whole = run(Layout(dp=2, flags=SHARDED), WHOLE)
    assert _lines(end) == _lines(whole)[len(whole.metrics) - len(end.metrics) :]
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == 10
    assert named(read_checkpoint(tmp_path), "model.")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".saving")]


def _run_and_kill(argv: list[str], *, after: float) -> None:
    """Two ranks, killed so many seconds after the first iteration was logged."""
    port = str(free_port())
    metrics = Path(argv[argv.index("--save") + 1]) / f"metrics-{port}.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv, "--metrics-jsonl", str(metrics)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            if metrics.exists() and metrics.read_text().count("\n") > 0:
                json.loads(metrics.read_text().splitlines()[0])
                time.sleep(after)
                break
            time.sleep(0.02)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
