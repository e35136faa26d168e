"""Gradients of one stage: collected in flat buffers, reduced over the replicas once per step, in bounded pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import nn

from megatron_overlap.comm import Channel, Pending
from megatron_overlap.grad_reduce.bucket_plan import (
    Bucket,
    BucketKind,
    cut_shards,
    plan_buckets,
    resolve_bucket_numel,
)
from megatron_overlap.grad_reduce.buffers import StageBuffers, shape_of, shards_of
from megatron_overlap.tensor_parallel.parameter import info_of


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are laid out and sent.

    `grad_dtype`: of the main gradients (None: fp64 for fp64 parameters, fp32 for all others). `piece_bytes` bounds
    what one collective holds of a bucket. `eager`: a plain bucket is issued as soon as its last gradient has come.
    """

    sharded: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    grad_dtype: torch.dtype | None = None
    piece_bytes: int = 16 * 2**20
    eager: bool = False


class _State(StrEnum):
    COLLECTING = "collecting gradients"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


@dataclass(frozen=True)
class _Flight:
    """A piece in flight, and what to do with its result."""

    pending: Pending
    store: Callable[[torch.Tensor], object] | None = None

    def land(self) -> None:
        result = self.pending.wait()
        if self.store is not None:
            self.store(result)


class GradReducer:
    """The gradient and parameter buffers of one stage, and their traffic over the dp channel.

    Life of a step: `zero`, one contribution per microbatch and use of each parameter, then `issue_complete` or
    `issue` for plain buckets, `issue_held` for those that need another sum first, `wait`; the optimizer;
    `issue_gather` and `wait_gather` where the optimizer is sharded. Nothing here divides: the loss carries the scale.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]],
        dp: Channel,
        options: ReduceOptions,
        *,
        label: str = "stage",
        tied: nn.Parameter | None = None,
        uses: Mapping[str, int] | None = None,
        unused: frozenset[str] = frozenset(),
    ) -> None:
        """`tied`: the embedding of the first stage where the last has a shared copy. `uses`: contributions per
        microbatch where they are not one; `unused`: names of parameters that may stay without a gradient."""
        named_params = list(named_params)
        assert named_params, f"{label} has no parameters"
        frozen = [name for name, param in named_params if not param.requires_grad]
        if frozen:
            raise ValueError(f"{label}: frozen parameters are not supported: {', '.join(frozen)}")
        shapes = [
            shape_of(name, param, tied=param is tied or info_of(param).shared_copy) for name, param in named_params
        ]
        numel = resolve_bucket_numel(
            sum(shape.numel for shape in shapes),
            dp_size=dp.size,
            bucket_size=options.bucket_size,
            num_buckets=options.num_buckets,
        )
        self.label = label
        self.dp = dp
        self.sharded = options.sharded and dp.size > 1
        self.plan = plan_buckets(shapes, numel, dp.size if self.sharded else 1)
        dtype = named_params[0][1].dtype
        grad_dtype = options.grad_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
        self.buffers = StageBuffers(named_params, self.plan, grad_dtype=grad_dtype)
        self.shard = dp.rank if self.sharded else 0
        self.piece_bytes = options.piece_bytes
        self.eager = options.eager
        self._names = [name for name, _ in named_params]
        self._bucket_of = [self.plan.placement(name).bucket for name in self._names]
        self._uses = [(uses or {}).get(name, 1) for name in self._names]
        self._unused = unused
        self._flights: list[tuple[int, _Flight]] = []
        self._gathers: dict[int, list[_Flight]] = {}
        for index, (_, param) in enumerate(named_params):
            self._attach(index, param)
        self._start(num_microbatches=1)

    # Collecting

    def zero(self, num_microbatches: int) -> None:
        """Start a step of so many microbatches."""
        assert not self._flights, f"{self.label}: gradients zeroed while a bucket is in flight"
        self.buffers.grads.zero_()
        self._start(num_microbatches)

    def _start(self, num_microbatches: int) -> None:
        self._counts = [0] * len(self._names)
        self._expected = [num_microbatches * uses for uses in self._uses]
        self._missing = [len(bucket.placements) for bucket in self.plan.buckets]
        self._states = [_State.COLLECTING for _ in self.plan.buckets]

    def _attach(self, index: int, param: nn.Parameter) -> None:
        # Layers that add into main_grad themselves call grad_ready; autograd's gradients go through the hook.
        param.grad_ready = partial(self._arrived, index)  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(partial(self._accumulate, index))

    def _accumulate(self, index: int, param: torch.Tensor) -> None:
        # Autograd runs this hook too where a layer gave it nothing, having added into main_grad itself.
        if param.grad is None:
            return
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
        self._arrived(index)

    def _arrived(self, index: int) -> None:
        bucket = self._bucket_of[index]
        self._counts[index] += 1
        if self._counts[index] > self._expected[index] or self._states[bucket] is not _State.COLLECTING:
            raise RuntimeError(
                f"{self.label}: gradient {self._counts[index]} of {self._expected[index]} expected for "
                f"{self._names[index]} came while its bucket {bucket} is {self._states[bucket]}"
            )
        if self._counts[index] == self._expected[index]:
            self._missing[bucket] -= 1
            if self.eager and not self._missing[bucket]:
                self.issue_complete()

    def check_complete(self, buckets: Iterable[Bucket] | None = None) -> None:
        """RuntimeError naming the parameters whose number of contributions is not the expected one."""
        chosen = {bucket.index for bucket in (self.plan.buckets if buckets is None else buckets)}
        if not any(self._missing[bucket] for bucket in chosen):
            return
        wrong = [
            f"{name} ({count} of {expected})"
            for name, count, expected, bucket in zip(
                self._names, self._counts, self._expected, self._bucket_of, strict=True
            )
            if bucket in chosen and count != expected and not (count == 0 and name in self._unused)
        ]
        if wrong:
            raise RuntimeError(f"{self.label}: gradients are missing before their reduction: {', '.join(wrong)}")

    def nonfinite(self) -> list[str]:
        """Global names of the parameters whose gradient on this rank holds a NaN or an infinity."""
        if bool(torch.isfinite(self.buffers.grads.sum())):
            return []
        return [
            info_of(param).pieces[0].name
            for param in self.buffers.params.values()
            if not bool(torch.isfinite(param.main_grad).all())  # type: ignore[attr-defined]
        ]

    # Reducing

    def issue_complete(self) -> None:
        """Issue the plain buckets that have all their gradients, in order up to the first that has not."""
        for bucket in self.buckets(BucketKind.PLAIN):
            if self._missing[bucket.index]:
                return
            if self._states[bucket.index] is _State.COLLECTING:
                self._issue(bucket)

    def issue(self) -> None:
        """Issue every plain bucket that is not issued yet."""
        self._issue_all(self.buckets(BucketKind.PLAIN))

    def issue_held(self) -> None:
        """Issue the buckets that needed a sum over tp, or over first and last stage, before."""
        self._issue_all([*self.buckets(BucketKind.TP_PARTIAL), *self.buckets(BucketKind.TIED)])

    def wait(self) -> None:
        """Wait for all that was issued, in that order. Own shards of the main gradients hold the sums then."""
        flights, self._flights = self._flights, []
        for bucket, flight in flights:
            flight.land()
            self._states[bucket] = _State.REDUCED

    def reduce(self) -> None:
        """Reduce all buckets; in a stage without held buckets this is all there is to do."""
        self.issue()
        self.issue_held()
        self.wait()

    def buckets(self, kind: BucketKind) -> list[Bucket]:
        return [bucket for bucket in self.plan.buckets if bucket.kind is kind]

    def assert_reduced(self) -> None:
        """RuntimeError naming the buckets that were not reduced in this step."""
        late = [f"{index} ({state})" for index, state in enumerate(self._states) if state is not _State.REDUCED]
        if late:
            raise RuntimeError(f"{self.label}: gradient buckets not reduced: {', '.join(late)}")

    def _issue_all(self, buckets: list[Bucket]) -> None:
        waiting = [bucket for bucket in buckets if self._states[bucket.index] is _State.COLLECTING]
        self.check_complete(waiting)
        for bucket in waiting:
            self._issue(bucket)

    def _issue(self, bucket: Bucket) -> None:
        assert self._states[bucket.index] is _State.COLLECTING, f"{self.label}: bucket {bucket.index} reduced twice"
        if self.dp.size == 1:
            self._states[bucket.index] = _State.REDUCED
            return
        self._states[bucket.index] = _State.IN_FLIGHT
        shards = shards_of(self.buffers.grads, bucket)
        for number, cut in enumerate(self._cuts(bucket, shards)):
            name = f"{self.label}.grads{bucket.index}.{number}"
            piece = shards[:, cut.start : cut.stop]
            if self.sharded:
                # Sub-slice c of every shard is contiguous only where it is the whole shard: else it is staged.
                pending = self.dp.reduce_scatter(piece.contiguous().view(-1), name)
                self._flights.append((bucket.index, _Flight(pending, piece[self.shard].copy_)))
            else:
                self._flights.append((bucket.index, _Flight(self.dp.all_reduce(piece.view(-1), name))))
        if self.dp.blocking:
            self.wait()

    def _cuts(self, bucket: Bucket, shards: torch.Tensor) -> list[range]:
        return cut_shards(bucket.shard_numel, bucket.num_shards, max(1, self.piece_bytes // shards.element_size()))

    # Gathering parameters

    def issue_gather(self) -> None:
        """Gather every parameter from the shards that own it, in order of first use."""
        if not self.sharded:
            return
        assert not self._gathers, f"{self.label}: parameters are already being gathered"
        for bucket in reversed(self.plan.buckets):
            shards = shards_of(self.buffers.weights, bucket)
            flights = self._gathers[bucket.index] = []
            for number, cut in enumerate(self._cuts(bucket, shards)):
                piece = shards[:, cut.start : cut.stop]
                pending = self.dp.all_gather(piece[self.shard], f"{self.label}.weights{bucket.index}.{number}")
                flights.append(_Flight(pending, partial(_unpack, piece)))
        if self.dp.blocking:
            self.wait_gather()

    def wait_gather(self, params: Iterable[str] | None = None) -> None:
        """Wait for the gathers of the named parameters, or of all; nothing where none is in flight."""
        if not self._gathers:
            return
        names = self._names if params is None else params
        wanted = {self.plan.placement(name).bucket for name in names}
        for index in [index for index in self._gathers if index in wanted]:
            for flight in self._gathers.pop(index):
                flight.land()

    def gather_parameters(self) -> None:
        """Have every parameter whole on this rank, from the shards of all."""
        self.issue_gather()
        self.wait_gather()


def _unpack(piece: torch.Tensor, gathered: torch.Tensor) -> None:
    piece.copy_(gathered.view(piece.shape))
