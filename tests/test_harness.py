"""The tools of the tests: ranks that fail are shown, and the shims find each mistake every time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import shims
from tests.ranks import ROOT, RankError, free_port, run_ranks

pytestmark = pytest.mark.ranks
TRIES = 20


def rank_and_sum(offset: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on(rank: int) -> None:
    value = torch.arange(3)
    if dist.get_rank() == rank:
        raise ValueError("what rank one says")
    dist.all_reduce(value)


def stop_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def never_return() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def make_a_group() -> int:
    dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def test_every_rank_returns_and_the_processes_are_used_again() -> None:
    first = run_ranks(2, rank_and_sum, (1,))
    second = run_ranks(4, rank_and_sum, (1,))
    assert [total for _, total in first + second] == [3, 3, 10, 10, 10, 10]
    assert [pid for pid, _ in second[:2]] == [pid for pid, _ in first]


def test_groups_end_with_their_check() -> None:
    assert run_ranks(2, make_a_group) == run_ranks(2, make_a_group) == [2, 2]


@pytest.mark.parametrize(
    ("check", "args", "message"),
    [
        (fail_on, (1,), r"(?s)rank 1 of 2 failed:.*in fail_on.*what rank one says.*value = tensor\(\[0, 1, 2\]\)"),
        (stop_on, (1,), "rank 1 of 2 failed:\nthe process died with exit code 7"),
        (never_return, (), r"(?s)ranks \[0\] of 2 not back after 2 s.*in never_return"),
    ],
)
def test_a_failure_is_shown_and_does_not_spoil_the_next_check(
    check: Callable[..., None], args: tuple[int, ...], message: str
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(2, check, args, timeout=2 if check is never_return else 60)
    assert time.monotonic() - start < 20
    assert [total for _, total in run_ranks(2, rank_and_sum, (0,))] == [1, 1]


def test_no_rank_outlives_the_session() -> None:
    source = "from tests.ranks import run_ranks; from tests.test_harness import rank_and_sum; import time\n"
    source += "print(*[pid for pid, _ in run_ranks(2, rank_and_sum, (0,))], flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, cwd=ROOT) as session:
        assert session.stdout
        pids = [int(pid) for pid in session.stdout.readline().split()]
        session.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_free_port_is_free() -> None:
    assert 0 < free_port() < 65536


# One asynchronous call of each kind: how it is launched, and the tensor that holds its result.


def launch(kind: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The handle, the tensor that is read and the one that is written (the same one where it works in place)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own, whole = torch.full((3,), rank + 1.0), torch.arange(3.0 * size) + rank
    if kind in {"isend", "irecv"}:
        # Rank 0 sends to rank 1; the test looks at the side it names.
        work = dist.isend(own, 1, tag=5) if rank == 0 else dist.irecv(own, 0, tag=5)
        return work, own, own
    if kind == "batch":
        other = torch.zeros(3)
        operations = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        sent, received = dist.batch_isend_irecv(operations)
        sent.wait()
        return received, own, other
    result = torch.zeros(3 * size if kind in {"all_gather_into_tensor", "all_to_all_single"} else 3)
    calls: dict[str, tuple[partial[Any], torch.Tensor, torch.Tensor]] = {
        "all_reduce": (partial(dist.all_reduce, own), own, own),
        "broadcast": (partial(dist.broadcast, own, 0), own, own),
        "all_gather_into_tensor": (partial(dist.all_gather_into_tensor, result, own), own, result),
        "all_gather": (partial(dist.all_gather, list(whole.chunk(size)), own), own, whole),
        "all_to_all_single": (partial(dist.all_to_all_single, result, whole), whole, result),
        "reduce_scatter_tensor": (partial(dist.reduce_scatter_tensor, result, whole), whole, result),
    }
    call, read, written = calls[kind]
    return call(async_op=True), read, written


def results(kind: str) -> torch.Tensor:
    work, _, written = launch(kind)
    work.wait()
    return written


def read_early(kind: str) -> int:
    early = 0
    for _ in range(TRIES):
        work, _, written = launch(kind)
        early += int(written.isnan().all())
        work.wait()
    return early


def faults_of(mistake: Callable[[], None]) -> list[str]:
    """What the freeze shim says about a mistake; it must also raise."""
    with pytest.raises(AssertionError, match="the freeze shim found"), shims.installed("freeze") as shim:  # noqa: PT012
        mistake()
        dist.barrier()
    return shim.report()


def write_early(kind: str, what: str) -> None:
    work, read, written = launch(kind)
    (read if what == "read" else written).add_(1)
    work.wait()


def faults_of_writing(kind: str, what: str) -> list[str]:
    return faults_of(partial(write_early, kind, what))


KINDS = ["all_reduce", "all_gather_into_tensor", "all_gather", "all_to_all_single", "reduce_scatter_tensor"]


@pytest.mark.parametrize("shim", ["count", "late", "freeze", "delay:0.001", "late+freeze+delay:0.001"])
@pytest.mark.parametrize("kind", [*KINDS, "broadcast", "irecv", "batch"])
def test_with_all_waits_in_place_a_shim_changes_nothing(shim: str, kind: str) -> None:
    for plain, under_shim in zip(
        run_ranks(2, results, (kind,)), run_ranks(2, results, (kind,), shim=shim), strict=True
    ):
        assert torch.equal(plain, under_shim)


@pytest.mark.parametrize("kind", [*KINDS, "broadcast", "irecv", "batch"])
def test_a_missing_wait_shows_every_time(kind: str) -> None:
    counts = run_ranks(2, read_early, (kind,), shim="late")
    assert counts[1] == TRIES
    assert counts[0] == (0 if kind in {"broadcast", "irecv"} else TRIES)


@pytest.mark.parametrize("what", ["read", "written"])
@pytest.mark.parametrize("kind", [*KINDS, "isend", "irecv"])
def test_a_write_before_the_wait_is_found(kind: str, what: str) -> None:
    for faults in run_ranks(2, faults_of_writing, (kind, what)):
        assert len(faults) == 1
        assert faults[0].endswith("#1: a tensor was written between launch and wait")


def write_is_lost() -> list[float]:
    work, _, written = launch("all_reduce")
    written.fill_(100)
    work.wait()
    return written.tolist()


def test_a_write_before_the_wait_is_lost() -> None:
    assert run_ranks(2, write_is_lost, shim="late") == [[3.0] * 3] * 2


def poisoned_ids() -> list[int]:
    ids = torch.arange(2)
    work = dist.all_reduce(ids, async_op=True)
    early = ids.tolist()
    work.wait()
    assert ids.tolist() == [0, 2]
    return early


def test_integers_are_poisoned_with_an_impossible_id() -> None:
    assert all(value < -(2**40) for ids in run_ranks(2, poisoned_ids, shim="late") for value in ids)


def drop_handle() -> None:
    launch("all_reduce")


def drop_tensor() -> None:
    dist.all_to_all_single(torch.empty(2), torch.ones(2), async_op=True).wait()


def resize_tensor() -> None:
    own = torch.ones(3)
    work = dist.all_gather([torch.empty(3) for _ in range(2)], own, async_op=True)
    own.untyped_storage().resize_(0)
    work.wait()


@pytest.mark.parametrize(
    ("mistake", "fault"),
    [
        (drop_handle, "all_reduce #1: never waited for"),
        (drop_tensor, "all_to_all_single #1: a tensor was dropped before the wait"),
        (resize_tensor, "all_gather #1: a tensor was resized before the wait"),
    ],
)
def test_dropped_and_resized_things_are_found(mistake: Callable[[], None], fault: str) -> None:
    assert run_ranks(2, faults_of, (mistake,)) == [[fault]] * 2


def test_a_frozen_check_fails_by_itself() -> None:
    with pytest.raises(RankError, match="all_reduce #1: never waited for"):
        run_ranks(2, drop_handle, shim="freeze")


def times(is_async: bool) -> tuple[float, float, bool, bool]:
    """Seconds until the launch returned and until two operations ended, and whether they said so themselves."""
    with shims.installed("delay:0.1"):
        start = time.monotonic()
        works = [dist.all_reduce(torch.ones(2), async_op=is_async) for _ in range(2)]
        launched = time.monotonic() - start
        before = is_async and any(work.is_completed() for work in works)
        if is_async:
            torch.futures.wait_all([work.get_future() for work in works])
        return launched, time.monotonic() - start, before, is_async and all(work.is_completed() for work in works)


def test_delayed_operations_take_turns_and_leave_the_caller_free() -> None:
    for launched, ended, before, after in run_ranks(2, times, (True,)):
        assert launched < 0.1
        assert ended >= 0.2
        assert (before, after) == (False, True)
    assert all(launched >= 0.2 for launched, *_ in run_ranks(2, times, (False,)))


def counted() -> list[shims.Call]:
    with shims.installed("count") as shim:
        results("all_reduce")
        dist.all_reduce(torch.ones(5))
        return shim.calls


def test_calls_are_counted() -> None:
    expected = [shims.Call("all_reduce", 3, (0, 1), True), shims.Call("all_reduce", 5, (0, 1), False)]
    assert run_ranks(2, counted) == [expected, expected]


def test_the_program_runs_under_a_shim(tmp_path: os.PathLike[str]) -> None:
    program = os.path.join(tmp_path, "program.py")
    with open(program, "w") as file:
        file.write("import sys, torch.distributed as dist; print(sys.argv[1:], dist.all_reduce.__wrapped__.__name__)")
    command = [sys.executable, "-m", "tests.shim_main", "late", program, "--flag"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed == "['--flag'] all_reduce\n"
