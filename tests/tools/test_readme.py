"""The README's own model runs as it stands there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ranks import ROOT

FLAGS = [
    *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "1", "--seq-length", "8"),
    *("--max-position-embeddings", "8", "--tokenizer-type", "NullTokenizer", "--vocab-size", "20", "--mock-data"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "3", "--lr", "1e-2"),
    *("--distributed-backend", "gloo", "--log-interval", "1", "--eval-iters", "1", "--num-workers", "0"),
]
PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]


def program_in_readme() -> str:
    blocks, block = [], ""
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("    ") or not line.strip():
            block += line
        else:
            blocks.append(block)
            block = ""
    (found,) = [textwrap.dedent(block) for block in blocks if "class Stage" in block]
    return found


@pytest.mark.ranks
def test_the_model_in_the_readme_trains_alike_with_a_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(program_in_readme(), encoding="utf-8")
    losses = []
    for world, flags in ((1, []), (2, PIPELINE)):
        metrics = tmp_path / f"metrics-{world}.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        done = subprocess.run(
            [*command, str(script), *FLAGS, *flags, "--metrics-jsonl", str(metrics)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([json.loads(line)["lm_loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
