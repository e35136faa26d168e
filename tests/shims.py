"""Stand-ins for the asynchronous calls of `torch.distributed` that make mistakes show every time, not by luck.

Each asynchronous operation runs on private copies, and `wait()` of the handle puts the result where the caller wants
it. On top of that

    late          the caller's output is poisoned (NaN) until the wait: reading early shows, writing early is lost
    freeze        every tensor of the operation has to be the same at the wait as at the launch, and alive; handles
                  that nobody waits for are reported
    delay:0.02    an operation ends 0.02 s after the data is there; those of one group take their turns, as on a link

A shim is named by a word or by several joined with "+": `late+delay:0.01`. Calls are counted in any case.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Operation:
    """Which arguments of a call it reads and which it writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    always_async: bool = False


OPERATIONS = {
    "all_reduce": Operation(("tensor",), ("tensor",)),
    "all_gather": Operation(("tensor",), ("tensor_list",)),
    "all_gather_into_tensor": Operation(("input_tensor",), ("output_tensor",)),
    "all_gather_single": Operation(("input_tensor",), ("output_tensor",)),
    "all_to_all": Operation(("input_tensor_list",), ("output_tensor_list",)),
    "all_to_all_single": Operation(("input",), ("output",)),
    "reduce_scatter": Operation(("input_list",), ("output",)),
    "reduce_scatter_tensor": Operation(("input",), ("output",)),
    "reduce_scatter_single": Operation(("input",), ("output",)),
    "reduce": Operation(("tensor",), ("tensor",)),
    "broadcast": Operation(("tensor",), ("tensor",)),
    "isend": Operation(("tensor",), (), always_async=True),
    "irecv": Operation((), ("tensor",), always_async=True),
}


@dataclass(frozen=True)
class Call:
    """A call that was made, asynchronous or not; `group` is the ranks that took part."""

    name: str
    numel: int
    group: tuple[int, ...]
    is_async: bool


@dataclass
class Shim:
    """The settings, and what was seen while the shim was installed."""

    late: bool = False
    freeze: bool = False
    delay_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    peak_in_flight: int = 0
    free_at: dict[tuple[Any, str], float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    inside: bool = False

    def report(self) -> list[str]:
        """Everything that was done wrong so far, handles without a wait included."""
        return [*self.faults, *(f"{label}: never waited for" for label in sorted(self.in_flight))]

    def run(self, name: str, real: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Stand in for the call of one operation; calls that torch makes to do it are left alone."""
        if self.inside:
            return real(**arguments)
        self.inside = True
        try:
            return self._run(name, real, arguments)
        finally:
            self.inside = False

    def _run(self, name: str, real: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """A synchronous call is only counted and delayed."""
        operation = OPERATIONS[name]
        is_async = operation.always_async or bool(arguments.get("async_op"))
        written = [tensor for key in operation.writes for tensor in _tensors(arguments[key])]
        read = [tensor for key in operation.reads for tensor in _tensors(arguments[key])]
        group = arguments.get("group")
        numel = max((sum(tensor.numel() for tensor in side) for side in (read, written)), default=0)
        self.calls.append(Call(name, numel, tuple(dist.get_process_group_ranks(group)), is_async))
        label = f"{name} #{len(self.calls)}"
        link = (group, name if name in {"isend", "irecv"} else "collective")
        if not is_async:
            result = real(**arguments)
            self.pass_link(link)
            return result
        private = {key: _copy(arguments[key]) for key in dict.fromkeys(operation.reads + operation.writes)}
        work = real(**{**arguments, **private})
        if work is None:
            return None
        if name == "broadcast" and _is_source(arguments):
            written = []
        results = [tensor for key in operation.writes for tensor in _tensors(private[key])]
        transfers = list(zip(written, results, strict=True)) if written else []
        if self.late:
            for tensor in written:
                _poison(tensor)
        # Where an operation writes over what it reads, the output is watched.
        watched = [_Frozen(tensor) for tensor in read if self.freeze and not _overlaps(tensor, written)]
        watched += [_Frozen(tensor) for tensor in written if self.freeze]
        self.in_flight.add(label)
        self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        timed = _Delayed(work, functools.partial(self.pass_link, link)) if self.delay_s else work
        return _Handle(self, label, timed, transfers, watched)

    def pass_link(self, link: tuple[Any, str]) -> None:
        """Sleep for the delay, after those who came before."""
        if self.delay_s:
            with self.lock:
                ready = max(time.monotonic(), self.free_at.get(link, 0.0)) + self.delay_s
                self.free_at[link] = ready
            time.sleep(max(0.0, ready - time.monotonic()))


class _Delayed:
    """A `dist.Work` that ends some time after the real one; a thread of its own watches that one."""

    def __init__(self, work: dist.Work, pass_link: Callable[[], None]) -> None:
        self._work, self._pass_link = work, pass_link
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            self._work.wait()
            self._pass_link()
            self._future.set_result(None)
        except Exception as error:
            self._future.set_exception(error)

    def wait(self, *args: Any) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Handle:
    """Looks like a `dist.Work`; only the first wait moves data."""

    def __init__(
        self,
        shim: Shim,
        label: str,
        work: dist.Work | _Delayed,
        transfers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        watched: Sequence[_Frozen],
    ) -> None:
        self._shim, self._label, self._work = shim, label, work
        self._transfers, self._watched = transfers, watched
        self._waited = False

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        if not self._waited:
            self._waited = True
            self._shim.in_flight.discard(self._label)
            faults = dict.fromkeys(frozen.fault() for frozen in self._watched)
            self._shim.faults += [f"{self._label}: {fault}" for fault in faults if fault]
            for tensor, result in self._transfers:
                tensor.data.copy_(result)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()


class _Frozen:
    """A tensor whose bytes must not change; it is not kept alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._checksum = _checksum(tensor)

    def fault(self) -> str | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return "a tensor was dropped before the wait"
        if storage.nbytes() != self._num_bytes:
            return "a tensor was resized before the wait"
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)
        return None if _checksum(tensor) == self._checksum else "a tensor was written between launch and wait"


@contextlib.contextmanager
def installed(name: str) -> Iterator[Shim]:
    """Replace the calls while the block runs; a freeze with faults ends in an `AssertionError`."""
    shim = parse(name)
    if not name:
        yield shim
        return
    real = {key: getattr(dist, key) for key in [*OPERATIONS, "batch_isend_irecv"] if hasattr(dist, key)}
    stand_ins = {key: _stand_in(shim, key, real[key]) for key in real if key in OPERATIONS}

    def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[Any]:
        works = []
        for each in operations:
            peer = "dst" if each.op is stand_ins["isend"] else "src"
            works.append(each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.peer}))
        return works

    # `P2POp` compares with the functions of the module they are defined in.
    for module in (dist, c10d):
        for key, function in {**stand_ins, "batch_isend_irecv": batch_isend_irecv}.items():
            setattr(module, key, function)
    try:
        yield shim
    finally:
        for module in (dist, c10d):
            for key, function in real.items():
                setattr(module, key, function)
    if shim.freeze and shim.report():
        raise AssertionError("\n".join(["the freeze shim found", *shim.report()]))


def parse(name: str) -> Shim:
    """Read `late`, `freeze`, `count`, `delay:SECONDS`, or several of them joined with "+"."""
    shim = Shim()
    for word in filter(None, name.split("+")):
        kind, _, value = word.partition(":")
        assert kind in {"late", "freeze", "count", "delay"}, f"unknown shim {word!r}"
        shim.late |= kind == "late"
        shim.freeze |= kind == "freeze"
        shim.delay_s = float(value) if kind == "delay" else shim.delay_s
    return shim


def _stand_in(shim: Shim, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return shim.run(name, real, dict(signature.bind(*args, **kwargs).arguments))

    return call


def _is_source(arguments: dict[str, Any]) -> bool:
    group = arguments.get("group")
    if arguments.get("group_src") is not None:
        return bool(dist.get_rank(group) == arguments["group_src"])
    return bool(dist.get_rank() == arguments["src"])


def _tensors(value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _copy(value: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    return [_copy(tensor) for tensor in value]


def _overlaps(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    start, end = _extent(tensor)
    return any(start < other_end and other_start < end for other_start, other_end in map(_extent, others))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.data.logical_not_()
    else:
        info = torch.iinfo(tensor.dtype)
        tensor.data.fill_(info.min or info.max)


def _checksum(tensor: torch.Tensor) -> int:
    # `numpy` forbids that the storage is resized later, hence the copy.
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return zlib.crc32(copy.reshape(-1).view(torch.uint8).numpy().data)
