"""Bucket plans: nothing lost, nothing twice, shards cut on rows, bounded padding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_overlap.grad_reduce.bucket_plan import (
    MAX_WASTE,
    BucketKind,
    BucketPlan,
    ParamShape,
    cut_shards,
    default_bucket_numel,
    plan_buckets,
    resolve_bucket_numel,
)

row_lengths = st.sampled_from([1, 3, 7, 8, 33, 64, 96, 160, 257])
shapes = st.lists(
    st.tuples(st.integers(1, 40), row_lengths, st.sampled_from(BucketKind), st.integers(0, 3)), min_size=1, max_size=25
).map(lambda rows: [ParamShape(f"p{i}", *row) for i, row in enumerate(rows)])
bucket_sizes = st.sampled_from([1, 50, 1000, 20_000, 40_000_000])


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ParamShape], int, BucketPlan]:
    params, numel = draw(shapes), draw(bucket_sizes)
    shards, alignment = draw(st.integers(1, 8)), draw(st.sampled_from([1, 64]))
    return params, numel, plan_buckets(params, numel, shards, alignment=alignment)


@given(plans())
def test_every_parameter_has_its_own_place(case: tuple[list[ParamShape], int, BucketPlan]) -> None:
    params, _, plan = case
    spans = []
    for bucket in plan.buckets:
        for placement in bucket.placements:
            assert placement.stop <= bucket.numel
            spans.append((bucket.offset + placement.start, bucket.offset + placement.stop, placement.shape.name))
    assert sorted(name for _, _, name in spans) == sorted(param.name for param in params)
    assert all(left[1] <= right[0] for left, right in pairwise(sorted(spans)))
    assert all(left.offset + left.numel <= right.offset for left, right in pairwise(plan.buckets))
    assert max(stop for _, stop, _ in spans) <= plan.total_numel


@given(plans())
def test_shards_own_each_row_once_as_one_run(case: tuple[list[ParamShape], int, BucketPlan]) -> None:
    params, _, plan = case
    for param in params:
        placement = plan.placement(param.name)
        size = plan.buckets[placement.bucket].shard_numel
        rows = []
        for shard in range(plan.num_shards):
            own = plan.rows_of(param.name, shard)
            assert own.step == 1
            for row in own:
                first = placement.start + row * param.row_numel
                assert shard * size <= first
                assert first + param.row_numel <= (shard + 1) * size
            rows += own
        assert rows == list(range(param.rows))


@given(plans())
def test_kinds_do_not_share_buckets_and_lie_side_by_side(case: tuple[list[ParamShape], int, BucketPlan]) -> None:
    _, _, plan = case
    for bucket in plan.buckets:
        assert {placement.shape.kind for placement in bucket.placements} == {bucket.kind}
        runs = [placement.shape.run for placement in bucket.placements]
        assert runs == sorted(runs)
    order = list(BucketKind)
    kinds = [order.index(bucket.kind) for bucket in plan.buckets]
    assert kinds == sorted(kinds)


@given(plans())
def test_padding_is_bounded(case: tuple[list[ParamShape], int, BucketPlan]) -> None:
    """A bucket of several row lengths loses at most MAX_WASTE of a full bucket at the shards' ends, and less than one
    aligned row before each parameter."""
    _, bucket_numel, plan = case
    for bucket in plan.buckets:
        rows = [placement.shape.row_numel for placement in bucket.placements]
        row_step = math.lcm(*rows) if plan.num_shards > 1 else 1
        starts = sum(max(64, row, MAX_WASTE * p.shape.numel) for row, p in zip(rows, bucket.placements, strict=True))
        ends = plan.num_shards * max(64, row_step, MAX_WASTE * bucket.numel / plan.num_shards)
        assert bucket.numel - bucket.used_numel <= starts + ends
        if plan.num_shards > 1 and row_step > max(rows):
            assert plan.num_shards * row_step <= MAX_WASTE * max(bucket_numel, bucket.used_numel)


def test_buckets_run_from_the_last_parameter_to_the_first() -> None:
    params = [ParamShape(f"layer{i}", 10, 64) for i in range(6)]
    plan = plan_buckets(params, 1280, 2)
    names = [[placement.shape.name for placement in bucket.placements] for bucket in plan.buckets]
    assert names == [["layer5", "layer4"], ["layer3", "layer2"], ["layer1", "layer0"]]
    assert all(bucket.used_numel == bucket.numel for bucket in plan.buckets)


def test_bucket_size_one_gives_one_parameter_per_bucket() -> None:
    params = [ParamShape("a", 3, 7), ParamShape("b", 1, 1), ParamShape("c", 64, 64)]
    plan = plan_buckets(params, 1, 2)
    assert [[p.shape.name for p in bucket.placements] for bucket in plan.buckets] == [["c"], ["b"], ["a"]]


def test_a_huge_bucket_size_is_one_bucket_and_says_so() -> None:
    plan = plan_buckets([ParamShape(f"p{i}", 64, 64) for i in range(20)], 10**12, 4)
    assert len(plan.buckets) == 1
    assert "nothing can overlap" in plan.summary()


def test_llama_7b_layer_wastes_little() -> None:
    """Row lengths 4096 and 11008 have the least common multiple 176128: they must not share a bucket over 64 shards."""
    params = [
        shape
        for layer in range(4)
        for shape in (
            ParamShape(f"{layer}.norm1", 4096, 1),
            ParamShape(f"{layer}.qkv", 12288, 4096),
            ParamShape(f"{layer}.proj", 4096, 4096),
            ParamShape(f"{layer}.norm2", 4096, 1),
            ParamShape(f"{layer}.fc1", 22016, 4096),
            ParamShape(f"{layer}.fc2", 4096, 11008),
        )
    ]
    plan = plan_buckets(params, default_bucket_numel(64), 64)
    assert plan.used_numel / plan.total_numel > 0.99


def test_summary_counts_buckets_and_sizes() -> None:
    plan = plan_buckets([ParamShape(f"p{i}", 1000, 64) for i in range(3)], 64_000, 2)
    assert plan.summary() == "3 gradient buckets of 64.0k, 64.0k, 64.0k elements in 2 shards each, 0.0% padding"


def test_bucket_size_from_flags() -> None:
    assert resolve_bucket_numel(10, dp_size=64, bucket_size=None, num_buckets=None) == 64_000_000
    assert resolve_bucket_numel(10, dp_size=2, bucket_size=None, num_buckets=None) == 40_000_000
    assert resolve_bucket_numel(10, dp_size=2, bucket_size=1, num_buckets=None) == 1
    assert resolve_bucket_numel(10, dp_size=2, bucket_size=None, num_buckets=4) == 3


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(1, 9000))
def test_cuts_cover_a_shard_in_bounded_pieces(shard: int, num_shards: int, max_numel: int) -> None:
    cuts = cut_shards(shard, num_shards, max_numel)
    assert [i for cut in cuts for i in cut] == list(range(shard))
    assert all(len(cut) * num_shards <= max(max_numel, num_shards) for cut in cuts)


def test_an_empty_parameter_is_refused() -> None:
    with pytest.raises(AssertionError, match="without elements"):
        plan_buckets([ParamShape("none", 0, 4)], 1, 1)
