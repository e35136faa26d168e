"""Run checks on several ranks.

`run_ranks` sends a module-level function to processes that stay alive over the session: starting them costs seconds,
a fresh gloo group per check costs milliseconds. `run_cli` starts the real program, one process per rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.rank_worker import Job, Outcome, die_with_parent, serve

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL = 4000


class RankError(AssertionError):
    """A check failed on a rank, or a rank died or did not come back in time."""


def run_ranks(
    world: int, check: Callable[..., Any], args: Sequence[Any] = (), *, shim: str | None = None, timeout: float = 60
) -> list[Any]:
    """Run `check(*args)` on `world` ranks inside a default gloo group and return what each rank returned.

    `check` is a module-level function; arguments and results are pickled. `shim` is read by `tests.shims.installed`.
    """
    return _pool().run(world, check, args, shim=shim or "", timeout=timeout)


@dataclass(frozen=True)
class Training:
    """The objects of `--metrics-jsonl`, and what each rank printed."""

    metrics: list[dict[str, Any]]
    stdout: list[str]


def run_training(world: int, argv: Sequence[str], *, shim: str | None = None, timeout: float = 120) -> Training:
    """Train in the pool's ranks with the program's flags."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        argv = [*argv, "--metrics-jsonl", str(metrics)]
        stdout = run_ranks(world, _train, (argv,), shim=shim, timeout=timeout)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    return Training([json.loads(line) for line in lines], stdout)


def _train(argv: list[str]) -> str:
    from megatron_overlap.training import pretrain

    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        pretrain(argv)
    return stdout.getvalue()


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:] if self.log.exists() else ""


class _Pool:
    """Processes that outlive a check but neither a failed check nor the session."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.rank_worker"])
        self._workers: list[_Worker] = []
        self._num_jobs = 0
        atexit.register(self.close)

    def close(self) -> None:
        self._discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self, world: int, check: Callable[..., Any], args: Sequence[Any], *, shim: str, timeout: float
    ) -> list[Any]:
        """See `run_ranks`."""
        assert check.__qualname__ == check.__name__, f"{check.__qualname__} is not a module-level function"
        self._num_jobs += 1
        job = Job(
            world=world,
            store=str(self._folder / f"store{self._num_jobs}"),
            module=check.__module__ if check.__module__ != "__main__" else "check_of_main",
            source=str(Path(inspect.getfile(check)).resolve()),
            qualname=check.__qualname__,
            arguments=pickle.dumps(tuple(args)),
            shim=shim,
            timeout=timeout,
        )
        workers = self._first(world)
        finished = False
        try:
            for worker in workers:
                worker.connection.send_bytes(pickle.dumps(job))
            values = _collect(workers, time.monotonic() + timeout, timeout)
            finished = True
        finally:
            if not finished:
                self._discard()
        Path(job.store).unlink(missing_ok=True)
        return values

    def _first(self, world: int) -> list[_Worker]:
        with _one_thread():
            for rank in range(len(self._workers), world):
                here, there = self._context.Pipe()
                log = self._folder / f"rank{rank}.log"
                process = self._context.Process(target=serve, args=(rank, there, str(log)))
                process.start()
                there.close()
                self._workers.append(_Worker(process, here, log))
        return self._workers[:world]

    def _discard(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


@functools.cache
def _pool() -> _Pool:
    return _Pool()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The fork server takes over the environment it is started in."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _collect(workers: Sequence[_Worker], deadline: float, timeout: float) -> list[Any]:
    """Wait for every rank; the failure that happened first is the one to show, not the first to be read."""
    outcomes: dict[int, Outcome] = {}
    open_ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    while open_ranks:
        ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            failed = any(outcome.error for outcome in outcomes.values())
            raise _first_error(outcomes, workers) if failed else _timeout(workers, list(open_ranks.values()), timeout)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks.pop(connection)
            outcomes[rank] = _receive(workers[rank])
            if outcomes[rank].error:
                deadline = min(deadline, time.monotonic() + 0.5)
    if any(outcome.error for outcome in outcomes.values()):
        raise _first_error(outcomes, workers)
    return [outcomes[rank].value for rank in range(len(workers))]


def _receive(worker: _Worker) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        # What the others report then is only the lost connection.
        return Outcome(None, f"the process died with exit code {worker.process.exitcode}", float("-inf"))
    return outcome


def _first_error(outcomes: dict[int, Outcome], workers: Sequence[_Worker]) -> RankError:
    rank = min((rank for rank in outcomes if outcomes[rank].error), key=lambda rank: outcomes[rank].when)
    text = f"rank {rank} of {len(workers)} failed:\n{outcomes[rank].error}"
    log = workers[rank].tail()
    return RankError(f"{text}\noutput of rank {rank}:\n{log}" if log else text)


def _timeout(workers: Sequence[_Worker], late: Sequence[int], timeout: float) -> RankError:
    """Say where each late rank stands."""
    for rank in late:
        pid = workers[rank].process.pid
        assert pid
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = [f"rank {rank} stands at:\n{workers[rank].tail()}" for rank in late]
    return RankError("\n".join([f"ranks {list(late)} of {len(workers)} not back after {timeout} s", *stacks]))


@dataclass(frozen=True)
class Finished:
    """One process of a command line run."""

    returncode: int
    stdout: str
    stderr: str


def run_cli(
    num_processes: int,
    argv: Sequence[str],
    *,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    shim: str | None = None,
    script: Path = ROOT / "pretrain_gpt.py",
) -> list[Finished]:
    """Start the script as `num_processes` ranks and return how each ended; `RankError` after `timeout`."""
    program = [str(script)]
    if shim:
        program = ["-m", "tests.shim_main", shim, *program]
    command = [sys.executable, *program, *argv]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(num_processes), "PYTHONPATH": str(ROOT), **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(num_processes)]
        processes = []
        for rank, (out, err) in enumerate(outputs):
            with out.open("wb") as stdout, err.open("wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=stdout,
                        stderr=stderr,
                        stdin=subprocess.DEVNULL,
                        cwd=ROOT,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                )
        late = _join(processes, time.monotonic() + timeout)
        finished = [
            Finished(process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"))
            for process, (out, err) in zip(processes, outputs, strict=True)
        ]
    if late:
        tails = [f"rank {rank}:\n{(finished[rank].stdout + finished[rank].stderr)[-LOG_TAIL:]}" for rank in late]
        raise RankError("\n".join([f"ranks {late} of {num_processes} not back after {timeout} s", *tails]))
    return finished


def _join(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Wait for all, kill those that are late with all they started, and return which."""
    late = []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[rank].pid, signal.SIGKILL)
        processes[rank].wait()
    return late


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
