"""Who a process is, the meeting of all ranks, and how one that fails ends the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.topology.process_groups import connect_store
from megatron_overlap.training.launch import (
    Environment,
    EnvironmentVariableError,
    check_torch_version,
    first_line,
    process_group,
    read_environment,
    select_device,
)
from tests.rank_worker import die_with_parent
from tests.ranks import ROOT, free_port

JOB = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = {**JOB, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Environment()),
        ({"RANK": "", "WORLD_SIZE": ""}, Environment()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}, Environment(local_rank=3)),
        (JOB, Environment(1, 4, 1, "node7", 29500)),
        ({**JOB, "LOCAL_RANK": ""}, Environment(1, 4, 1, "node7", 29500)),
        (TORCHRUN, Environment(1, 4, 1, "node7", 29500, agent_store=True, attempt=2)),
    ],
)
def test_environment(environ: Mapping[str, str], expected: Environment) -> None:
    assert read_environment(environ) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "WORLD_SIZE=4, but RANK is not set"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=4, but MASTER_PORT is not set"),
        ({"RANK": None, "MASTER_ADDR": None}, "RANK, MASTER_ADDR are not set: start with torchrun"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4: RANK must be from 0"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=4"),
        ({"WORLD_SIZE": None}, "RANK=1 and WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE='4.0' is not an integer"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not an integer"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not an integer"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be from 1 to 65535"),
    ],
)
def test_an_environment_that_fits_nothing_names_the_variable(changes: Mapping[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentVariableError, match=message):
        read_environment(environ)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("--lr must be above 0\nsecond line"), "--lr must be above 0"),
        (EnvironmentVariableError("RANK is not set"), "RANK is not set"),
        (ValueError(), "ValueError: "),
        (KeyError("tokens"), "KeyError: 'tokens'"),
        (RuntimeError("\nconnection closed\n"), "RuntimeError: connection closed"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_error_in_one_line(error: BaseException, expected: str) -> None:
    assert first_line(error) == expected


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0+cpu", "2.12.9"])
def test_an_old_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch_version()
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(EnvironmentVariableError, match=rf"torch {version[:4]}.*upgrade"):
        check_torch_version()


def test_devices() -> None:
    assert select_device("gloo", 5) == torch.device("cpu")
    count = torch.cuda.device_count()
    with pytest.raises(EnvironmentVariableError, match=f"LOCAL_RANK={count}, but {count} CUDA devices"):
        select_device("nccl", count)


def open_group(environment: Environment) -> None:
    with process_group(environment, "gloo", timedelta(seconds=5)):
        raise AssertionError("the group opened")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentVariableError, match=f"MASTER_PORT={port} cannot be opened .*another job"):
            open_group(Environment(0, 2, 0, "127.0.0.1", port))


def test_an_address_that_does_not_resolve_is_named() -> None:
    with pytest.raises(EnvironmentVariableError, match=r"MASTER_ADDR=no-such-host\.invalid cannot be resolved"):
        open_group(Environment(1, 2, 1, "no-such-host.invalid", 29500))


def test_a_job_of_one_needs_no_port() -> None:
    with process_group(Environment(), "gloo", timedelta(seconds=5)):
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1]
        # Whoever is called inside an open group uses it and leaves it open.
        with process_group(Environment(0, 2, 0, "no-such-host.invalid", 1), "gloo", timedelta(seconds=5)):
            assert dist.get_world_size() == 1
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_attempts_of_a_launcher_do_not_see_each_other() -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    first, second = (
        connect_store(
            "127.0.0.1", port, rank=0, world_size=2, agent_store=True, attempt=attempt, timeout=timedelta(seconds=5)
        )
        for attempt in (0, 1)
    )
    first.set("failure", "rank 1")
    assert first.check(["failure"])
    assert not second.check(["failure"])
    assert agent.num_keys() >= 1


# Processes of their own: the end of a process is what is tested.

PROGRAM = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_overlap.training import launch

launch._WATCH_SECONDS = 0.2
environment = launch.read_environment()
with launch.process_group(environment, "gloo", timedelta(seconds=60)):
    dist.barrier()
    exec(sys.argv[1 + environment.rank])
"""
WAITS = "time.sleep(100)"
WAITS_FOR_A_KEY = "dist.distributed_c10d._get_default_store().wait(['never'], timedelta(seconds=100))"
RAISES = "raise ValueError('--data-path: part 3 is missing')"


def start(*bodies: str) -> list[subprocess.Popen[str]]:
    """One rank for each body, which runs once all have met."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(len(bodies)), "PYTHONPATH": str(ROOT)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *bodies],
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=die_with_parent,
        )
        for rank in range(len(bodies))
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Status and errors of each, with less than 20 s between the first and the last to end."""
    try:
        deadline = time.monotonic() + 90
        while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        last = time.monotonic() + 20
        return [
            (process.wait(max(0.0, last - time.monotonic())), process.stderr.read() if process.stderr else "")
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.ranks
def test_a_failing_rank_ends_those_that_wait_for_something_else() -> None:
    (status0, error0), (status1, error1), (status2, error2) = finish(start(WAITS, RAISES, WAITS_FOR_A_KEY))
    assert status0 != 0
    assert status1 != 0
    assert status2 != 0
    assert "ValueError: --data-path: part 3 is missing" in error1
    for error in (error0, error2):
        assert "another rank failed" in error
    assert "rank 1: --data-path: part 3 is missing" in error0


@pytest.mark.ranks
def test_the_end_of_the_first_rank_ends_the_others() -> None:
    (status0, error0), (status1, error1) = finish(start(RAISES, WAITS))
    assert status0 != 0
    assert status1 != 0
    assert "ValueError: --data-path: part 3 is missing" in error0
    assert "rank 1: ending, since another rank failed" in error1


@pytest.mark.ranks
def test_a_rank_that_takes_longer_to_end_well_is_left_alone() -> None:
    results = finish(start("pass", "time.sleep(2)"))
    assert [status for status, _ in results] == [0, 0], results
