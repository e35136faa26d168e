"""The environment: who this process is, the process group, and how a failing rank ends all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megatron_overlap.topology.process_groups import (
    connect_store,
    default_group_exists,
    destroy_default_group,
    init_default_group,
)

logger = logging.getLogger(__name__)

OLDEST_TORCH = (2, 13)
_FAILURE_KEY = "megatron_overlap/failure"
_ENDED_KEY = "megatron_overlap/ended"
_WATCH_SECONDS = 1.0
# How gloo and nccl say that the other end is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


class EnvironmentVariableError(ValueError):
    """The environment does not describe a rank of a job; the text names the variable."""


@dataclass(frozen=True)
class Environment:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun, srun wrappers or users set them.

    `agent_store`: torchrun serves the store, which then outlives the ranks of an `attempt` that it starts anew.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_store: bool = False
    attempt: int = 0


def check_torch_version() -> None:
    """EnvironmentVariableError where torch is older than the oldest tested."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise EnvironmentVariableError(
            f"torch {torch.__version__} is too old: the oldest tested is {wanted}; upgrade torch"
        )


def read_environment(environ: Mapping[str, str] | None = None, *, joins: bool = True) -> Environment:
    """This process's place in its job; a process without RANK and WORLD_SIZE is a job of one.

    With `joins` False WORLD_SIZE alone is enough: the process will not meet the others.
    """
    environ = os.environ if environ is None else environ
    rank = _integer(environ, "RANK", 0)
    world_size = _integer(environ, "WORLD_SIZE", 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise EnvironmentVariableError(
            f"RANK={rank} and WORLD_SIZE={world_size}: RANK must be from 0 to WORLD_SIZE - 1"
        )
    if world_size == 1 or not joins:
        return Environment(rank, world_size, local_rank=_integer(environ, "LOCAL_RANK", 0))
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise EnvironmentVariableError(
            f"WORLD_SIZE={world_size}, but {', '.join(missing)} {verb} not set: start with torchrun, "
            "or export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    master_port = _integer(environ, "MASTER_PORT", 0)
    if not 0 < master_port < 1 << 16:
        raise EnvironmentVariableError(f"MASTER_PORT={master_port} must be from 1 to 65535")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        master_addr=environ["MASTER_ADDR"],
        master_port=master_port,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise EnvironmentVariableError(f"{name}={text!r} is not an integer") from None


class PeerFailedError(ValueError):
    """This rank ends because another one did; the text says which, where that is known."""


@contextlib.contextmanager
def process_group(
    environment: Environment, backend: str, timeout: timedelta, *, prepare: Callable[[], None] | None = None
) -> Iterator[None]:
    """The default process group for the time of a job; one that exists already is used and left alone.

    `prepare` runs before the group is made, when ranks can already tell each other of failures. From then on a
    watcher ends this process within seconds after another rank reported its own. PeerFailedError where communication
    broke since another rank ended.
    """
    prepare = prepare or (lambda: None)
    if default_group_exists():
        prepare()
        yield
        return
    if environment.world_size > 1:
        _check_rendezvous(environment)
    store = _meet(environment, timeout)
    watcher = _Watcher(store, environment) if environment.world_size > 1 else None
    try:
        prepare()
        init_default_group(backend, store, rank=environment.rank, world_size=environment.world_size, timeout=timeout)
        yield
    except BaseException as error:
        if watcher is not None:
            watcher.report(error)
            watcher.explain(error)
        raise
    if watcher is not None:
        watcher.end(timeout)
    destroy_default_group()


def _meet(environment: Environment, timeout: timedelta) -> Any:
    """The store of the job; EnvironmentVariableError where some ranks do not come."""
    try:
        return connect_store(
            environment.master_addr,
            environment.master_port,
            rank=environment.rank,
            world_size=environment.world_size,
            agent_store=environment.agent_store,
            attempt=environment.attempt,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise EnvironmentVariableError(
            f"not all {environment.world_size} ranks met at MASTER_ADDR={environment.master_addr} "
            f"MASTER_PORT={environment.master_port} within --distributed-timeout-minutes "
            f"{timeout.total_seconds() / 60:g}: a rank did not start or ended early ({str(error).splitlines()[0]})"
        ) from error


def _check_rendezvous(environment: Environment) -> None:
    """A clear error where rank 0 could not open its port or another rank cannot resolve the address."""
    address, port = environment.master_addr, environment.master_port
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise EnvironmentVariableError(f"MASTER_ADDR={address} cannot be resolved: {error}") from None
    if environment.rank != 0 or environment.agent_store:
        return
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise EnvironmentVariableError(
                f"MASTER_PORT={port} cannot be opened on this host ({error.strerror}): another job may use it; "
                "choose another MASTER_PORT"
            ) from None


class _Watcher:
    """Looks in the store, once a second, for the failure of another rank.

    Collectives notice a dead peer by themselves where they have a connection to it; this covers ranks that wait for
    something else.
    """

    def __init__(self, store: Any, environment: Environment) -> None:
        self._store = store
        self._environment = environment
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(store.clone(),), daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the others why this rank ends; the first report stays, so one that only echoes another's waits."""
        self._stop.set()
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER):
            time.sleep(_WATCH_SECONDS)
        with contextlib.suppress(Exception):
            text = f"rank {self._environment.rank}: {first_line(error)}"
            self._store.compare_set(_FAILURE_KEY, "", text)

    def explain(self, error: BaseException) -> None:
        """Raise PeerFailedError where `error` is the echo of another rank's end."""
        text = str(error)
        if not (isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_PEER)):
            return
        reason = "which was killed or ended without a word"
        with contextlib.suppress(Exception):
            told = self._store.get(_FAILURE_KEY).decode()
            if not told.startswith(f"rank {self._environment.rank}:"):
                reason = f"which failed: {told}"
        raise PeerFailedError(f"ending, since the connection to another rank broke, {reason}") from error

    def end(self, timeout: timedelta) -> None:
        """Stop watching. The rank that serves the store waits for the others first: they would miss it."""
        environment = self._environment
        num_ended = self._store.add(_ENDED_KEY, 1)
        give_up = time.monotonic() + timeout.total_seconds()
        serves = environment.rank == 0 and not environment.agent_store
        while serves and num_ended < environment.world_size and time.monotonic() < give_up:
            time.sleep(0.05)
            num_ended = self._store.add(_ENDED_KEY, 0)
        self._stop.set()
        self._thread.join(timeout=10 * _WATCH_SECONDS)

    def _watch(self, store: Any) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            try:
                failed = store.check([_FAILURE_KEY])
                reason = store.get(_FAILURE_KEY).decode() if failed else ""
            except Exception:
                # The store lives on rank 0 or in its launcher: it is gone when they are.
                failed, reason = True, "the rendezvous store is gone: rank 0 ended"
            if not failed:
                continue
            # The main thread gets a moment to fail by itself, with its own place in the code.
            time.sleep(2 * _WATCH_SECONDS)
            if not self._stop.is_set():
                end_process(f"rank {self._environment.rank}: ending, since another rank failed: {reason}")


def first_line(error: BaseException) -> str:
    """An error in one line, its type where the text alone does not say what happened."""
    text = str(error).strip().splitlines()
    line = text[0] if text else ""
    return line if isinstance(error, ValueError) and line else f"{type(error).__name__}: {line}"


def end_process(message: str, status: int = 1) -> None:
    """End at once, past destructors that could wait for dead peers."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)


def setup_logging(rank: int) -> None:
    """Log lines on stderr carry the rank."""
    logging.basicConfig(level=logging.INFO, format=f"[rank {rank}] %(message)s", stream=sys.stderr, force=True)


def quiet_libraries() -> None:
    """Keep tokenizers from warning about forks of loader processes."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def select_device(backend: str, local_rank: int) -> torch.device:
    """CUDA device `local_rank` for nccl, the CPU for gloo; EnvironmentVariableError where it does not exist."""
    if backend != "nccl":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise EnvironmentVariableError(
            f"LOCAL_RANK={local_rank}, but {count} CUDA devices are visible: start fewer processes per node, "
            "or train on the CPU with --distributed-backend gloo"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
