"""Which runs of a flat buffer an optimizer shard updates, and which named rectangles lie in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron_overlap.grad_reduce.bucket_plan import BucketPlan, Placement
from megatron_overlap.grad_reduce.buffers import StageBuffers
from megatron_overlap.tensor_parallel.parameter import NamedSlice, Piece, info_of


@dataclass(frozen=True)
class Segment:
    """`[start, stop)` of the flat buffer: own rows of parameters that are treated alike, and padding (zeros)."""

    bucket: int
    run: int
    start: int
    stop: int


@dataclass(frozen=True)
class Rectangle:
    """The own rows of one piece: where they start in the flat buffer, and where in the named global tensor."""

    piece: Piece
    segment: int
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    parameter: str


def own_segments(plan: BucketPlan, shard: int) -> list[Segment]:
    """One segment per bucket and run, as far as the shard has any of it."""
    segments = []
    for bucket in plan.buckets:
        first = shard * bucket.shard_numel
        for run, members in groupby(bucket.placements, key=lambda placement: placement.shape.run):
            placements = list(members)
            start = max(placements[0].start, first)
            stop = min(placements[-1].stop, first + bucket.shard_numel)
            if start < stop:
                segments.append(Segment(bucket.index, run, bucket.offset + start, bucket.offset + stop))
    return segments


def own_rectangles(buffers: StageBuffers, segments: list[Segment], shard: int) -> Iterator[Rectangle]:
    """Every named rectangle in the segments: at most one per name."""
    index_of = {(segment.bucket, segment.run): index for index, segment in enumerate(segments)}
    for bucket in buffers.plan.buckets:
        for placement in bucket.placements:
            name = placement.shape.name
            rows = buffers.plan.rows_of(name, shard)
            for piece in info_of(buffers.params[name]).pieces:
                own = range(max(rows.start, piece.local_start), min(rows.stop, piece.local_start + piece.rows))
                if not own:
                    continue
                yield Rectangle(
                    piece,
                    segment=index_of[placement.bucket, placement.shape.run],
                    start=bucket.offset + placement.start + own.start * placement.shape.row_numel,
                    shape=(len(own), *buffers.params[name].shape[1:]),
                    offset=(piece.offset[0] + own.start - piece.local_start, *piece.offset[1:]),
                    parameter=name,
                )


def named_slice(rectangle: Rectangle, prefix: str, flat: torch.Tensor, flat_start: int, *, write: bool) -> NamedSlice:
    """The rectangle in a flat tensor that holds the buffer's elements from `flat_start` on."""
    start = rectangle.start - flat_start
    numel = _numel(rectangle.shape)
    return NamedSlice(
        f"{prefix}.{rectangle.piece.name}",
        rectangle.piece.global_shape,
        rectangle.offset,
        flat[start : start + numel].view(rectangle.shape),
        write,
    )


def placements_of(plan: BucketPlan, segment: Segment) -> list[Placement]:
    return [placement for placement in plan.buckets[segment.bucket].placements if placement.shape.run == segment.run]


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
