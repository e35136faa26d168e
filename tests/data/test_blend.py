"""Blends: how the data flags are read, and the interleave of several sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.data import blend
from megatron_overlap.data.blend import (
    Blend,
    BlendedDataset,
    BlendIndex,
    blend_size,
    build_blend_index,
    member_sizes,
    parse_blend,
)
from megatron_overlap.data.sample import Sample
from tests.data import oracle

WEIGHTS = st.lists(st.floats(1e-4, 1e10) | st.integers(1, 10).map(float), min_size=1, max_size=6)


class Counting:
    def __init__(self, size: int, base: int) -> None:
        self.size, self.base = size, base

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": np.asarray([self.base + index])}


def pairs(index: BlendIndex) -> list[tuple[int, int]]:
    return list(zip(index.members.tolist(), index.samples.tolist(), strict=True))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(WEIGHTS, st.integers(0, 300))
def test_interleave_is_that_of_the_oracle(weights: list[float], size: int) -> None:
    index = build_blend_index(weights, size)
    assert pairs(index) == oracle.blend(weights, size)
    assert (index.members.dtype, index.samples.dtype) == (np.int16, np.int64)
    assert index.counts.tolist() == np.bincount(index.members, minlength=len(weights)).tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(WEIGHTS, st.integers(0, 300), st.integers(1, 20), st.integers(1, 20))
def test_blocks_of_an_interleave_join_without_a_trace(
    weights: list[float], size: int, block: int, max_blocks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "BLOCK", block)
        patch.setattr(blend, "MAX_BLOCKS", max_blocks)
        assert pairs(build_blend_index(weights, size)) == oracle.blend(weights, size)


def test_many_sets_of_very_different_weights_over_several_blocks() -> None:
    weights = (np.random.default_rng(3).dirichlet(np.full(40, 0.3)) + 1e-9).tolist()
    assert pairs(build_blend_index(weights, 5000)) == oracle.blend(weights, 5000)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(WEIGHTS, st.integers(1, 2000))
def test_sizes_of_a_weighted_blend(weights: list[float], wanted: int) -> None:
    scaled = [weight / sum(weights) for weight in weights]
    sizes, size = oracle.blend_sizes(scaled, wanted)
    assert (member_sizes(scaled, wanted), blend_size(scaled, wanted)) == (sizes, size)


@pytest.mark.parametrize("weights", [[0.001, 0.999], [0.5, 0.5], [1e10, 3e10, 1.0]])
def test_every_prefix_of_a_blend_keeps_the_proportions(weights: list[float]) -> None:
    members = build_blend_index(weights, 8000).members
    for set_number, weight in enumerate(weights):
        ahead = np.cumsum(members == set_number) - weight / sum(weights) * np.arange(1, 8001)
        assert ahead.max() <= 1
        assert ahead.min() >= 1 - len(weights)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], Blend(("a",), None)),
        (["2024"], Blend(("2024",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["a", "b", "c"], Blend(("a", "b", "c"), None)),
        (["1", "a"], Blend(("a",), (1.0,))),
        (["0.25", "a", ".75", "b"], Blend(("a", "b"), (0.25, 0.75))),
        (["1e10", "a", "3e10", "b"], Blend(("a", "b"), (0.25, 0.75))),
    ],
)
def test_data_flags(words: list[str], expected: Blend) -> None:
    assert parse_blend(words, "--data-path") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data-path: no data prefix"),
        (["1", "a", "0", "b"], "--data-path: the weight of b must be a number above 0, found '0'"),
        (["1", "a", "-2", "b"], "weight of b .* found '-2'"),
        (["1", "a", "nan", "b"], "weight of b .* found 'nan'"),
        (["1", "a", "b", "c"], "weight of c .* found 'b'"),
        (["1", "a", "b"], "found the number '1'"),
        (["a", "0.5", "b", "0.5"], "found the number '0.5'"),
    ],
)
def test_wrong_data_flags(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_blend(words, "--data-path")


def test_blended_samples_name_their_set() -> None:
    index = build_blend_index([2.0, 1.0], 6)
    dataset = BlendedDataset([Counting(4, 0), Counting(2, 100)], index)
    read = [(int(dataset[i]["dataset_id"]), int(dataset[i]["tokens"][0])) for i in range(len(dataset))]
    assert read == [(member, 100 * member + sample) for member, sample in oracle.blend([2.0, 1.0], 6)]
    with pytest.raises(IndexError):
        dataset[6]


def test_a_set_too_small_for_its_share_is_noticed_at_start() -> None:
    with pytest.raises(ValueError, match="takes 2 samples of data set 1, which was built with 1: raise the surplus"):
        BlendedDataset([Counting(4, 0), Counting(1, 100)], build_blend_index([2.0, 1.0], 6))
