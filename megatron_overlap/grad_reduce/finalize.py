"""The end of a step's gradients: the sums over other groups first, then the replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_overlap.comm import Channel, Pending
from megatron_overlap.grad_reduce.bucket_plan import BucketKind, cut_shards
from megatron_overlap.grad_reduce.reducer import GradReducer


def finalize_gradients(reducers: Sequence[GradReducer], *, tp: Channel, embedding: Channel) -> None:
    """Leave the sum over all microbatches and ranks in the main gradients (own shards where sharded).

    Every element is summed in one order on every rank: first and last stage (tied embedding), or tp (gradients that
    are partial there), then dp. Plain buckets need neither, and are in flight meanwhile.
    """
    for reducer in reducers:
        reducer.check_complete()
    sums = [*_sum_tied(reducers, embedding), *_sum_partial(reducers, tp)]
    for reducer in reducers:
        reducer.issue()
    for pending in sums:
        pending.wait()
    _share_tied(reducers)
    for reducer in reducers:
        reducer.issue_held()
    for reducer in reducers:
        reducer.wait()


def _sum_tied(reducers: Sequence[GradReducer], embedding: Channel) -> list[Pending]:
    """Both copies of the tied embedding: one here and one on the other end of the pipeline, or both here."""
    copies = _tied_grads(reducers)
    assert len(copies) <= 2, "more than two copies of the tied embedding on one rank"
    if not copies:
        return []
    for other in copies[1:]:
        copies[0].add_(other)
    if embedding.size == 1:
        return []
    assert len(copies) == 1, "both copies of the tied embedding are here, but its group has two ranks"
    piece_numel = reducers[0].piece_bytes // copies[0].element_size()
    return [
        embedding.all_reduce(copies[0][cut.start : cut.stop], f"tied.grads.{number}")
        for number, cut in enumerate(cut_shards(copies[0].numel(), 1, piece_numel))
    ]


def _share_tied(reducers: Sequence[GradReducer]) -> None:
    copies = _tied_grads(reducers)
    for other in copies[1:]:
        other.copy_(copies[0])


def _tied_grads(reducers: Sequence[GradReducer]) -> list[torch.Tensor]:
    return [grads for reducer in reducers for grads in _flat_grads(reducer, BucketKind.TIED)]


def _sum_partial(reducers: Sequence[GradReducer], tp: Channel) -> list[Pending]:
    return [
        tp.all_reduce(grads, f"{reducer.label}.partial_grads")
        for reducer in reducers
        for grads in _flat_grads(reducer, BucketKind.TP_PARTIAL)
    ]


def _flat_grads(reducer: GradReducer, kind: BucketKind) -> list[torch.Tensor]:
    """The main gradients of all buckets of a kind, which lie side by side, as one flat tensor, if there are any."""
    buckets = reducer.buckets(kind)
    if not buckets:
        return []
    return [reducer.buffers.grads[buckets[0].offset : buckets[-1].offset + buckets[-1].numel]]
