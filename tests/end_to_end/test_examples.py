"""The examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.custom_model.pretrain_custom import train
from tests.ranks import ROOT, run_ranks

TIMEOUT_S = 120
LAYOUTS = {
    "tensor": (2, ["--tensor-model-parallel-size", "2"]),
    "pipeline": (2, ["--pipeline-model-parallel-size", "2"]),
    "data": (2, ["--use-distributed-optimizer"]),
    "tensor and interleaved pipeline": (
        4,
        [
            *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
            *("--num-layers-per-virtual-pipeline-stage", "1"),
        ],
    ),
}


def train_custom(argv: list[str]) -> None:
    assert train(argv) == 0


def losses_of_custom(world: int, argv: list[str], folder: Path) -> list[float]:
    metrics = folder / f"metrics-{world}.jsonl"
    metrics.unlink(missing_ok=True)
    flags = [*argv, "--train-iters", "6", "--log-interval", "1", "--metrics-jsonl", str(metrics)]
    run_ranks(world, train_custom, (flags,), timeout=TIMEOUT_S)
    return [json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()]


def run_program(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.ranks
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_an_own_model_trains_alike_at_any_layout(tmp_path: Path, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    alone = losses_of_custom(1, [], tmp_path)
    assert len(alone) == 6
    assert alone[-1] < alone[0]
    assert losses_of_custom(world, flags, tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.ranks
def test_an_own_flag_reaches_the_own_data(tmp_path: Path) -> None:
    assert losses_of_custom(1, ["--noise", "0.8"], tmp_path)[0] > 1.2 * losses_of_custom(1, [], tmp_path)[0]


@pytest.mark.ranks
def test_the_custom_example_learns_as_a_program(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, str(ROOT / "examples/custom_model/pretrain_custom.py"), "--metrics-jsonl", str(metrics)]
    run = run_program(command, tmp_path)
    assert run.returncode == 0, run.stderr
    losses = [json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()]
    assert losses[-1] < losses[0] / 4
    assert "absolute error" in run.stdout
    assert "on validation set" in run.stdout


@pytest.mark.ranks
def test_the_cpu_script_trains_with_torchrun(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    command = [str(ROOT / "examples/train_gpt_cpu.sh"), "--train-iters", "2", "--metrics-jsonl", str(metrics)]
    run = run_program(command, tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()] == [1, 2]
