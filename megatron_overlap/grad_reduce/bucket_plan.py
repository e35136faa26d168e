"""Where every parameter of a stage lies in its flat buffers: buckets of equal shards, cut on rows of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

# Starts that GEMM and vector kernels like: 64 elements, as Megatron aligns them.
ALIGNMENT = 64
# Closing a bucket costs one more collective, padding costs bytes in all of them.
MAX_WASTE = 0.05


class BucketKind(StrEnum):
    """What has to happen before a bucket may be reduced over dp; buckets are laid out in this order."""

    PLAIN = "plain"
    TP_PARTIAL = "tp_partial"
    TIED = "tied"


@dataclass(frozen=True)
class ParamShape:
    """A parameter as the plan sees it: `rows` rows of `row_numel` elements.

    Parameters of one `run` lie side by side in their bucket, lower runs first.
    """

    name: str
    rows: int
    row_numel: int
    kind: BucketKind = BucketKind.PLAIN
    run: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel


@dataclass(frozen=True)
class Placement:
    """A parameter at `start` of its bucket."""

    shape: ParamShape
    bucket: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel


@dataclass(frozen=True)
class Bucket:
    """`num_shards` equal shards of `shard_numel` elements, from `offset` of the flat buffer on."""

    index: int
    kind: BucketKind
    offset: int
    shard_numel: int
    num_shards: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        return self.shard_numel * self.num_shards

    @property
    def used_numel(self) -> int:
        return sum(placement.shape.numel for placement in self.placements)


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of a stage, in the order in which they become ready."""

    buckets: tuple[Bucket, ...]
    num_shards: int

    @property
    def total_numel(self) -> int:
        last = self.buckets[-1] if self.buckets else None
        return last.offset + last.numel if last else 0

    @property
    def used_numel(self) -> int:
        return sum(bucket.used_numel for bucket in self.buckets)

    @cached_property
    def _by_name(self) -> dict[str, Placement]:
        return {placement.shape.name: placement for bucket in self.buckets for placement in bucket.placements}

    def placement(self, name: str) -> Placement:
        return self._by_name[name]

    def rows_of(self, name: str, shard: int) -> range:
        """The rows of a parameter that `shard` owns: one run, maybe empty."""
        placement = self._by_name[name]
        shape, size = placement.shape, self.buckets[placement.bucket].shard_numel
        first, last = (
            min(max(border - placement.start, 0), shape.numel) for border in (shard * size, (shard + 1) * size)
        )
        assert first % shape.row_numel == 0, f"shard {shard} starts inside a row of {name}"
        assert last % shape.row_numel == 0, f"shard {shard} ends inside a row of {name}"
        return range(first // shape.row_numel, last // shape.row_numel)

    def summary(self) -> str:
        """Number and sizes of the buckets, as printed at start."""
        if not self.buckets:
            return "no gradient buckets"
        sizes = ", ".join(_short(bucket.numel) for bucket in self.buckets)
        padding = 1 - self.used_numel / self.total_numel
        note = "; a single bucket, so nothing can overlap with its reduction" if len(self.buckets) == 1 else ""
        plural = "s" if len(self.buckets) > 1 else ""
        return (
            f"{len(self.buckets)} gradient bucket{plural} of {sizes} elements in {self.num_shards} "
            f"shard{'s' if self.num_shards > 1 else ''} each, {padding:.1%} padding{note}"
        )


def default_bucket_numel(dp_size: int) -> int:
    """Megatron's bucket size: larger groups pay more for each collective."""
    return max(40_000_000, 1_000_000 * dp_size)


def resolve_bucket_numel(total_numel: int, *, dp_size: int, bucket_size: int | None, num_buckets: int | None) -> int:
    """Elements per bucket from `--ddp-bucket-size` and `--ddp-num-buckets`."""
    if bucket_size is not None:
        return bucket_size
    if num_buckets is not None:
        return max(1, -(-total_numel // num_buckets))
    return default_bucket_numel(dp_size)


def plan_buckets(
    params: Sequence[ParamShape], bucket_numel: int, num_shards: int, *, alignment: int = ALIGNMENT
) -> BucketPlan:
    """Fill buckets greedily with `params`, given in order of first use, from the last to the first.

    A bucket closes once it holds `bucket_numel` elements, or early where the next row length would push the least
    common multiple of its rows, of which a shard is a multiple, so high that padding wastes more than `MAX_WASTE`.
    """
    assert bucket_numel >= 1, f"a bucket of {bucket_numel} elements"
    assert num_shards >= 1, f"{num_shards} shards"
    assert len({param.name for param in params}) == len(params), "parameter names are not unique"
    assert all(param.numel > 0 for param in params), "a parameter without elements"
    buckets: list[Bucket] = []
    offset = 0
    for kind in BucketKind:
        own = [param for param in reversed(params) if param.kind is kind]
        for group in _groups(own, bucket_numel, num_shards):
            bucket = _lay_out(group, len(buckets), offset, num_shards, alignment)
            buckets.append(bucket)
            offset = _round_up(offset + bucket.numel, alignment)
    return BucketPlan(tuple(buckets), num_shards)


def cut_shards(shard_numel: int, num_shards: int, max_numel: int) -> list[range]:
    """Sub-slices of a shard such that one sub-slice of every shard together holds at most `max_numel` elements."""
    step = max(1, max_numel // num_shards)
    count = -(-shard_numel // step)
    even = -(-shard_numel // count)
    if even > ALIGNMENT:
        even = min(_round_up(even, ALIGNMENT), step)
    return [range(start, min(start + even, shard_numel)) for start in range(0, shard_numel, even)]


def _groups(params: Sequence[ParamShape], bucket_numel: int, num_shards: int) -> Iterator[list[ParamShape]]:
    """The parameters of each bucket."""
    group: list[ParamShape] = []
    used, step = 0, 1
    for param in params:
        grown = math.lcm(step, param.row_numel)
        too_wasteful = grown > step and num_shards * grown > MAX_WASTE * max(bucket_numel, used + param.numel)
        if group and num_shards > 1 and too_wasteful:
            yield group
            group, used, grown = [], 0, param.row_numel
        group.append(param)
        used, step = used + param.numel, grown
        if used >= bucket_numel:
            yield group
            group, used, step = [], 0, 1
    if group:
        yield group


def _lay_out(group: Sequence[ParamShape], index: int, offset: int, num_shards: int, alignment: int) -> Bucket:
    placements: list[Placement] = []
    end = 0
    for param in sorted(group, key=lambda param: param.run):
        row = param.row_numel if num_shards > 1 else 1
        start = _round_up(end, _aligned(row, alignment, param.numel))
        placements.append(Placement(param, index, start))
        end = start + param.numel
    rows = math.lcm(*(param.row_numel for param in group)) if num_shards > 1 else 1
    step = _aligned(rows, alignment, end // num_shards)
    shard_numel = _round_up(-(-end // num_shards), step)
    return Bucket(index, group[0].kind, offset, shard_numel, num_shards, tuple(placements))


def _aligned(step: int, alignment: int, numel: int) -> int:
    """`step` raised to a multiple of `alignment` too, unless that is large beside `numel` (odd row lengths)."""
    both = math.lcm(step, alignment)
    return both if both == step or both <= max(alignment, MAX_WASTE * numel) else step


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _short(numel: int) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if numel >= size:
            return f"{numel / size:.1f}{unit}"
    return str(numel)
