"""Rank and layer arithmetic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_overlap.topology.grid import ORDERS, Coordinates, Grid, StageLayout

sizes = st.integers(1, 5)
grids = st.builds(Grid, tp=sizes, pp=sizes, dp=sizes, order=st.sampled_from(ORDERS))


@st.composite
def layouts(draw: st.DrawFn) -> StageLayout:
    """Any layout that fits: layers of each virtual stage are drawn, the flags follow."""
    pp, virtual, middle = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    first = draw(st.none() | st.integers(1, 4)) if pp > 1 else None
    last = draw(st.none() | st.integers(1, 4)) if pp > 1 else None
    counts = [middle if count is None else count for count in (first, *[None] * (pp - 2), last)][:pp]
    flags = {name: count * virtual for name, count in (("first", first), ("last", last)) if count is not None}
    return StageLayout(sum(counts) * virtual, pp, virtual, **flags)


@given(grids)
def test_places_and_ranks_are_inverse(grid: Grid) -> None:
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert len(set(places)) == grid.world_size
    assert [grid.rank(tp=at.tp, dp=at.dp, pp=at.pp) for at in places] == list(range(grid.world_size))


@given(grids)
def test_groups_partition_the_ranks(grid: Grid) -> None:
    for groups, size in (
        (grid.tp_groups(), grid.tp),
        (grid.dp_groups(), grid.dp),
        (grid.pp_groups(), grid.pp),
        (grid.model_parallel_groups(), grid.tp * grid.pp),
    ):
        assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
        assert {len(group) for group in groups} == {size}
        assert all(group == sorted(group) for group in groups)


@given(grids)
def test_members_differ_in_their_own_dimension_only(grid: Grid) -> None:
    for dimension, groups in (("tp", grid.tp_groups()), ("dp", grid.dp_groups()), ("pp", grid.pp_groups())):
        for group in groups:
            places = [grid.coordinates(rank) for rank in group]
            assert [getattr(at, dimension) for at in places] == list(range(len(group)))
            others = {"tp", "dp", "pp"} - {dimension}
            assert all(len({getattr(at, other) for at in places}) == 1 for other in others)


@given(grids)
def test_embedding_groups(grid: Grid) -> None:
    groups = grid.embedding_groups()
    assert len(groups) == grid.tp * grid.dp
    ends = {0, grid.pp - 1}
    for group in groups:
        places = [grid.coordinates(rank) for rank in group]
        assert {at.pp for at in places} == ends
        assert len({(at.tp, at.dp) for at in places}) == 1
        assert len(group) == len(ends)


def test_tensor_parallel_ranks_are_neighbours() -> None:
    grid = Grid(tp=2, pp=2, dp=2)
    assert grid.world_size == 8
    assert grid.tp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.dp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.pp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.model_parallel_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.coordinates(5) == Coordinates(tp=1, dp=0, pp=1)


@pytest.mark.parametrize(("tp", "dp", "pp"), list(itertools.product(range(2), range(3), range(4))))
def test_rank_formula(tp: int, dp: int, pp: int) -> None:
    assert Grid(tp=2, dp=3, pp=4).rank(tp=tp, dp=dp, pp=pp) == pp * (3 * 2) + dp * 2 + tp


def test_other_order() -> None:
    grid = Grid(tp=2, pp=2, dp=2, order="tp-pp-dp")
    assert grid.dp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.pp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.model_parallel_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_longer_pipelines_embed_at_both_ends() -> None:
    assert Grid(tp=1, pp=4, dp=2).embedding_groups() == [[0, 6], [1, 7]]
    assert Grid(tp=2, pp=1, dp=1).embedding_groups() == [[0], [1]]


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ((0, 1, 1), "--tensor-model-parallel-size"),
        ((1, -1, 1), "--pipeline-model-parallel-size"),
        ((1, 1, 0), "world size"),
    ],
)
def test_grid_needs_ranks(sizes: tuple[int, int, int], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        Grid(*sizes)


def test_places_outside_the_grid() -> None:
    grid = Grid(tp=2, pp=1, dp=1)
    with pytest.raises(ValueError, match="found 2"):
        grid.coordinates(2)
    with pytest.raises(ValueError, match="pp rank"):
        grid.rank(tp=0, dp=0, pp=1)
    with pytest.raises(ValueError, match="order"):
        Grid(tp=1, pp=1, dp=1, order="pp-tp-dp")


@given(layouts())
def test_each_layer_once_and_in_order(layout: StageLayout) -> None:
    layers = [layer for stage in range(layout.num_stages) for layer in layout.layers(stage)]
    assert layers == list(range(layout.num_layers))
    assert all(len(layout.layers(stage)) > 0 for stage in range(layout.num_stages))


@given(layouts())
def test_stages_of_a_rank(layout: StageLayout) -> None:
    owned = [layout.stages_of(pp_rank) for pp_rank in range(layout.pp)]
    assert sorted(itertools.chain(*owned)) == list(range(layout.num_stages))
    for pp_rank, stages in enumerate(owned):
        assert len(stages) == layout.virtual
        assert all(layout.pp_rank(stage) == pp_rank for stage in stages)
        total = sum(len(layout.layers(stage)) for stage in stages)
        fixed = {0: layout.first, layout.pp - 1: layout.last}.get(pp_rank)
        assert fixed is None or total == fixed


@pytest.mark.parametrize(("layers", "pp", "virtual"), [(8, 2, 2), (24, 4, 3), (6, 1, 2), (4, 4, 1)])
def test_interleaved_numbers(layers: int, pp: int, virtual: int) -> None:
    layout = StageLayout(layers, pp, virtual)
    each = layers // (pp * virtual)
    for chunk, pp_rank in itertools.product(range(virtual), range(pp)):
        stage = chunk * pp + pp_rank
        first = chunk * (layers // virtual) + pp_rank * each
        assert layout.stages_of(pp_rank)[chunk] == stage
        assert layout.layers(stage) == range(first, first + each)


def test_uneven_ends() -> None:
    layout = StageLayout(6, 4, first=1, last=1)
    assert [len(layout.layers(stage)) for stage in range(4)] == [1, 2, 2, 1]
    layout = StageLayout(7, 4, first=1)
    assert [len(layout.layers(stage)) for stage in range(4)] == [1, 2, 2, 2]


def test_uneven_ends_are_divided_over_virtual_stages() -> None:
    layout = StageLayout(14, 4, 2, first=4, last=2)
    assert [len(layout.layers(stage)) for stage in range(8)] == [2, 2, 2, 1, 2, 2, 2, 1]
    assert layout.layers(4) == range(7, 9)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layers": 6, "pp": 4}, ["--num-layers 6", "--pipeline-model-parallel-size 4"]),
        (
            {"num_layers": 7, "pp": 4, "first": 1, "last": 1},
            ["--num-layers 7", "--decoder-first-pipeline-num-layers 1"],
        ),
        ({"num_layers": 5, "pp": 2, "first": 2, "last": 2}, ["--num-layers 5", "--decoder-last-pipeline-num-layers 2"]),
        ({"num_layers": 4, "pp": 2, "first": 4}, ["--num-layers 4", "--decoder-first-pipeline-num-layers 4"]),
        ({"num_layers": 4, "pp": 2, "virtual": 3}, ["--num-layers 4", "3 virtual stages"]),
        ({"num_layers": 6, "pp": 2, "virtual": 2, "first": 3}, ["2 virtual stages"]),
        ({"num_layers": 4, "pp": 1, "first": 2}, ["--pipeline-model-parallel-size 2"]),
        ({"num_layers": 4, "pp": 0}, ["--pipeline-model-parallel-size"]),
        ({"num_layers": 0, "pp": 1}, ["--num-layers 0"]),
    ],
)
def test_layouts_that_lose_layers(values: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        StageLayout(**values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_stages_outside_the_layout() -> None:
    layout = StageLayout(4, 2)
    for ask in (layout.layers, layout.pp_rank, layout.stages_of):
        with pytest.raises(ValueError, match=r"0\.\.1, found 2"):
            ask(2)
