"""The life of one rank process: take a check, run it inside a fresh gloo group, report, and wait for the next."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.util
import logging
import os
import pickle
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests import shims

TESTS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """One check for one rank."""

    world: int
    store: str
    module: str
    source: str
    qualname: str
    arguments: bytes
    shim: str
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """What a rank reports; `when` is on the clock that all processes of a machine share."""

    value: Any
    error: str
    when: float


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that happens."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def serve(rank: int, connection: Connection, log: str) -> None:
    """Run checks until the other end of the connection closes."""
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.ftruncate(output, 0)
        connection.send_bytes(pickle.dumps(_outcome(job, rank)))


def _outcome(job: Job, rank: int) -> Outcome:
    try:
        value = _run(job, rank)
        pickle.dumps(value)
    except (Exception, SystemExit) as error:
        return Outcome(None, _describe(error), time.monotonic())
    return Outcome(value, "", time.monotonic())


def _run(job: Job, rank: int) -> Any:
    check = _load(job)
    arguments = pickle.loads(job.arguments)
    _start_group(job, rank)
    with _environment(job, rank), shims.installed(job.shim):
        return check(*arguments)


def _load(job: Job) -> Callable[..., Any]:
    """Find the check by its file: the name a test module has depends on how pytest was started."""
    module = sys.modules.get(job.module)
    if module is None or getattr(module, "__file__", None) != job.source:
        module = _import_file(job.module, job.source)
    found: Any = module
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return found


def _import_file(name: str, source: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _environment(job: Job, rank: int) -> Iterator[None]:
    """Give each check the state of a new process, as far as torch, logging and signals go."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
    # The rendezvous has taken place: no port is opened, but a program may ask for one.
    os.environ.update({**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    handlers, level = list(logging.root.handlers), logging.root.level
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        signal.signal(signal.SIGTERM, terminate)
        # Even turning it off would import the compiler, which takes seconds.
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)


def _start_group(job: Job, rank: int) -> None:
    """Make the default group, over a file store.

    The groups of the check before end only here, when all of its ranks are known to be through.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout + 5),
    )


def _describe(error: BaseException) -> str:
    """The traceback, and the values in the innermost frame of a test: the ranks have no assertion rewriting."""
    text = "".join(traceback.format_exception(error)).rstrip()
    frame = _innermost_test_frame(error.__traceback__)
    if frame is None:
        return text
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxother = 200
    values = [f"  {name} = {shorten.repr(value)}" for name, value in frame.items()]
    return "\n".join([text, "where", *values])


def _innermost_test_frame(trace: TracebackType | None) -> dict[str, Any] | None:
    found = None
    while trace is not None:
        source = Path(trace.tb_frame.f_code.co_filename)
        if source.is_relative_to(TESTS) and source.name not in {"rank_worker.py", "shims.py"}:
            found = trace.tb_frame.f_locals
        trace = trace.tb_next
    return found
