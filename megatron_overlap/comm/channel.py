"""Issue and wait: every collective, send and receive of the project."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.pending import Label, Ledger, Pending
from megatron_overlap.timeline.spans import Lane, MessageKey, Recorder
from megatron_overlap.topology.process_groups import Group

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Channel:
    """One communicator for one kind of traffic.

    Every method issues its operation and returns a `Pending` that owns the tensors given to it: they must not be
    written, scaled, reused or freed before its `wait()`. With `blocking` the wait happens inside the issue, which is
    the synchronous baseline; sends and receives never block here, since the schedule says where they are waited for.
    `deterministic` sums in rank order in groups above two, where the order of a back end may depend on sizes.
    """

    def __init__(
        self,
        group: Group,
        lane: Lane,
        ledger: Ledger,
        recorder: Recorder,
        *,
        blocking: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.group = group
        self.lane = lane
        self.blocking = blocking
        self._ledger = ledger
        self._recorder = recorder
        self._rank_order = deterministic and group.size > 2

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Pending:
        """Sum (or max) over the group, in place on `tensor`, any shape."""
        if self.size == 1:
            return self._complete(tensor, name)
        _require_contiguous(tensor, name)
        sent = 2 * tensor.nbytes * (self.size - 1) // self.size
        if self._rank_order and op == "sum":
            return self._issue(name, sent, (tensor,), lambda: self._start_rank_order_sum(tensor))
        return self._issue(
            name,
            sent,
            (tensor,),
            lambda: (dist.all_reduce(tensor, _REDUCE_OPS[op], self.group.handle, async_op=True), lambda: tensor),
        )

    def all_gather(self, tensor: torch.Tensor, name: str) -> Pending:
        """Concatenate every rank's `[k, ...]` along dim 0: `[size * k, ...]`."""
        if self.size == 1:
            return self._complete(tensor, name)
        _require_contiguous(tensor, name)
        whole = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        return self._issue(
            name,
            tensor.nbytes * (self.size - 1),
            (tensor,),
            lambda: (_all_gather_single(whole, tensor, self.group.handle), lambda: whole),
        )

    def reduce_scatter(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum `[size * k, ...]` over the group and keep rows `[rank * k, (rank + 1) * k)`: `[k, ...]`.

        gloo's own reduce-scatter moves as much as an all-reduce; an all-to-all and a local sum, in rank order,
        move half of that.
        """
        if self.size == 1:
            return self._complete(tensor, name)
        _require_contiguous(tensor, name)
        assert tensor.shape[0] % self.size == 0, f"{name}: {tensor.shape[0]} rows over {self.size} ranks"
        sent = tensor.nbytes * (self.size - 1) // self.size
        if self.group.backend == "gloo" or self._rank_order:
            return self._issue(name, sent, (tensor,), lambda: self._start_scattered_sum(tensor))
        shard = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        return self._issue(
            name,
            sent,
            (tensor,),
            lambda: (_reduce_scatter_single(shard, tensor, self.group.handle), lambda: shard),
        )

    def broadcast(self, tensor: torch.Tensor, src_index: int, name: str) -> Pending:
        """Give every rank of the group the tensor of the one at `src_index`, in place."""
        if self.size == 1:
            return self._complete(tensor, name)
        _require_contiguous(tensor, name)
        source = self.group.ranks[src_index]
        sent = tensor.nbytes if src_index == self.rank else 0
        return self._issue(
            name,
            sent,
            (tensor,),
            lambda: (dist.broadcast(tensor, source, self.group.handle, async_op=True), lambda: tensor),
        )

    def send(self, tensor: torch.Tensor, dst_index: int, tag: int, name: str, key: MessageKey | None = None) -> Pending:
        """Send to the rank at `dst_index`; messages between the same two ranks are told apart by `tag`."""
        _require_contiguous(tensor, name)
        target = self.group.ranks[dst_index]
        return self._issue(
            name,
            tensor.nbytes,
            (tensor,),
            lambda: (dist.isend(tensor, target, self.group.handle, tag), lambda: tensor),
            key=key,
            blocking=False,
        )

    def recv(self, buffer: torch.Tensor, src_index: int, tag: int, name: str, key: MessageKey | None = None) -> Pending:
        """Receive into `buffer`, which must have the sender's shape and dtype: gloo does not check."""
        _require_contiguous(buffer, name)
        source = self.group.ranks[src_index]
        return self._issue(
            name,
            0,
            (buffer,),
            lambda: (dist.irecv(buffer, source, self.group.handle, tag), lambda: buffer),
            key=key,
            blocking=False,
        )

    def barrier(self, name: str = "barrier") -> None:
        """Meet all ranks of the group; on CUDA the host waits too."""
        self.all_reduce(torch.zeros(1, device=self.device), name).wait().item()

    @property
    def device(self) -> torch.device:
        """Where small tensors of this channel must live."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if self.group.backend == "nccl" else torch.device("cpu")
        )

    def _start_scattered_sum(self, tensor: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        parts = torch.empty_like(tensor)
        work = dist.all_to_all_single(parts, tensor, group=self.group.handle, async_op=True)
        return work, lambda: _sum_in_rank_order(parts.view(self.size, tensor.shape[0] // self.size, *tensor.shape[1:]))

    def _start_rank_order_sum(self, tensor: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """All-to-all, local sum, all-gather: the sum of an element does not depend on how a tensor is cut."""
        share = -(-tensor.numel() // self.size)
        padded = tensor.new_zeros(share * self.size)
        padded[: tensor.numel()] = tensor.flatten()
        work, own_sum = self._start_scattered_sum(padded)

        def finish() -> torch.Tensor:
            whole = torch.empty_like(padded)
            gathered = _all_gather_single(whole, own_sum(), self.group.handle)
            gathered.wait()
            return tensor.copy_(whole[: tensor.numel()].view_as(tensor))

        return work, finish

    def _complete(self, tensor: torch.Tensor, name: str) -> Pending:
        return Pending(Label(self.lane, name, 0), None, result=tensor)

    def _issue(
        self,
        name: str,
        num_bytes: int,
        kept: tuple[torch.Tensor, ...],
        start: Callable[[], tuple[Any, Callable[[], torch.Tensor]]],
        *,
        key: MessageKey | None = None,
        blocking: bool | None = None,
    ) -> Pending:
        label = Label(self.lane, name, num_bytes)
        recorder = self._recorder
        operation = recorder.operation(self.lane, name, num_bytes, key=key)
        work, result = start()
        ticket = self._ledger.enter(label)
        waiting = threading.Event()
        if recorder.enabled:
            # What completes during its wait ends with it: compute stands still until then.
            _on_completion(work, lambda: None if waiting.is_set() else operation.finish())

        def finish() -> torch.Tensor:
            waiting.set()
            with recorder.wait(self.lane, name, key=key):
                work.wait()
                value = result()
            # The first end counts. torch's point-to-point works on gloo offer no future: they end here.
            operation.finish()
            self._ledger.leave(ticket)
            return value

        pending = Pending(label, finish, kept)
        if self.blocking if blocking is None else blocking:
            pending.result, pending.finish = finish(), None
        return pending


def _on_completion(work: Any, tell: Callable[[], None]) -> None:
    """Have `tell` called when `work` completes, on another thread, where the back end can."""
    with contextlib.suppress(RuntimeError, AttributeError):
        work.get_future().add_done_callback(lambda _: tell())


def _sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _all_gather_single(whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    # Newer torch deprecates the *_tensor names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def _reduce_scatter_single(shard: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(shard, whole, group=group, async_op=True)


def _require_contiguous(tensor: torch.Tensor, name: str) -> None:
    assert tensor.is_contiguous(), f"{name}: a collective needs a contiguous tensor"
