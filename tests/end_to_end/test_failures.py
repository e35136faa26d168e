"""What goes wrong ends on all ranks within a minute, with one readable line and a status that is not 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import flags_of
from tests.rank_worker import die_with_parent
from tests.ranks import ROOT, Finished, free_port, run_cli

pytestmark = pytest.mark.ranks

FAULTY = Path(__file__).with_name("faulty_pretrain.py")
A_MINUTE = 60.0
QUICK = ["--distributed-timeout-minutes", "1"]

# What is wrong, flags, words that the message has.
MISTAKES = [
    ("typo", "--num-layer 4", ["--num-layer", "--num-layers"]),
    ("missing data", "--data-path /nowhere/set", ["/nowhere/set"]),
    ("world size", "--tensor-model-parallel-size 3", ["--tensor-model-parallel-size", "3", "2"]),
    ("missing tokenizer", "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere", ["/nowhere"]),
    (
        "missing checkpoint",
        "--load /nowhere --exit-on-missing-checkpoint",
        ["/nowhere", "--exit-on-missing-checkpoint"],
    ),
    ("metrics file", "--metrics-jsonl /nowhere/metrics", ["--metrics-jsonl", "/nowhere/metrics"]),
]


@pytest.mark.parametrize(("what", "flags", "words"), MISTAKES, ids=[what for what, *_ in MISTAKES])
def test_a_mistake_is_one_line_without_a_traceback(what: str, flags: str, words: list[str]) -> None:
    ranks = run_cli(2, flags_of(flags), timeout=A_MINUTE)
    assert all(rank.returncode != 0 for rank in ranks)
    text = "".join(rank.stderr for rank in ranks)
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if "error" in line]
    assert any(all(word in line for word in words) for line in lines), text


def test_all_mistakes_are_told_together() -> None:
    (alone,) = run_cli(1, flags_of("--num-layer 4 --hidden-size 65 --micro-batch-size 3 --lr x"), timeout=A_MINUTE)
    assert alone.returncode == 2
    errors = [line for line in alone.stderr.splitlines() if "error:" in line]
    for flag in ("--num-layer", "--hidden-size", "--micro-batch-size", "--lr"):
        assert any(flag in line for line in errors), alone.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        ranks = run_cli(1, flags_of(), env={"MASTER_PORT": str(port), "WORLD_SIZE": "2"}, timeout=A_MINUTE)
    assert ranks[0].returncode != 0
    assert f"MASTER_PORT={port}" in ranks[0].stderr
    assert time.monotonic() - start < A_MINUTE


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"])
@pytest.mark.parametrize("fault", ["raise", "kill", "exit"])
def test_a_dead_rank_ends_the_others(fault: str, layout: str) -> None:
    ranks = _run_faulty(fault, layout)
    assert ranks[0].returncode not in (0, None)
    if fault == "raise":
        assert ranks[1].returncode == 1
        assert "rank 1: RuntimeError: the fault that was asked for" in ranks[1].stderr


def test_a_loss_that_is_not_a_number_ends_all_ranks_in_one_iteration() -> None:
    ranks = _run_faulty("nan", "--pipeline-model-parallel-size 2")
    for rank, finished in enumerate(ranks):
        assert finished.returncode == 1
        assert f"rank {rank}: error: the loss is nan in iteration 1" in finished.stderr


def test_a_full_disk_on_one_rank_is_told_by_all(tmp_path: Path) -> None:
    ranks = _run_faulty("save", f"--use-distributed-optimizer --save {tmp_path} --save-interval 1")
    for finished in ranks:
        assert finished.returncode == 1
        assert "rank 1" in finished.stderr
        assert "No space left on device" in finished.stderr
    assert not list(tmp_path.glob("iter_*"))


def test_a_cluster_configuration_is_printed_on_one_machine() -> None:
    flags = flags_of("--tensor-model-parallel-size 4 --dump-config")
    (alone,) = run_cli(1, flags, env={"WORLD_SIZE": "8", "MASTER_PORT": "", "MASTER_ADDR": ""}, timeout=A_MINUTE)
    assert alone.returncode == 0
    assert json.loads(alone.stdout)["derived"]["data_parallel_size"] == 2


def test_parameters_of_one_name_on_two_stages_are_refused_before_training() -> None:
    ranks = _run_faulty("name", "--pipeline-model-parallel-size 2")
    for finished in ranks:
        assert finished.returncode == 1
        assert "parameter extra.weight is in stage 0 and in stage 1" in finished.stderr
        assert "context.layers" in finished.stderr


def test_a_plain_parameter_under_sequence_parallelism_is_refused() -> None:
    for finished in _run_faulty("name", "--tensor-model-parallel-size 2 --sequence-parallel"):
        assert finished.returncode == 1
        assert "extra.weight is a plain torch parameter" in finished.stderr
        assert "Partition" in finished.stderr


def _run_faulty(fault: str, flags: str) -> list[Finished]:
    start = time.monotonic()
    ranks = run_cli(2, flags_of(flags, f"--fault {fault}") + QUICK, timeout=A_MINUTE, script=FAULTY)
    assert time.monotonic() - start < A_MINUTE
    return ranks


def test_a_rank_killed_while_its_loaders_start_takes_them_along() -> None:
    """Loaders hold copies of the rank's sockets: while one lives, the other ranks do not see the end of their peer."""
    argv = flags_of("--num-workers 2 --train-iters 100000 --log-interval 100000", *QUICK)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        for rank in range(2)
    ]
    try:
        loaders = _first_children(ranks[1], within=A_MINUTE)
        ranks[1].kill()
        assert ranks[1].wait(timeout=10) == -signal.SIGKILL
        assert ranks[0].wait(timeout=A_MINUTE / 2) not in (0, None)
        deadline = time.monotonic() + 10
        while any(_runs(pid) for pid in loaders) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in loaders if _runs(pid)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _first_children(process: subprocess.Popen[bytes], *, within: float) -> list[int]:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            return [int(pid) for pid in children]
    raise AssertionError("the rank started no loader")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
