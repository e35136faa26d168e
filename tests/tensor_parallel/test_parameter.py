"""Which rectangles of global parameters a local one holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_overlap.tensor_parallel import Piece, info_of, name_parameters
from megatron_overlap.tensor_parallel.parameter import Partition


class Holder(nn.Module):
    """A module with one parameter, `part`, under a given name."""

    def __init__(self, shape: tuple[int, ...], partition: Partition | None, name: str = "part") -> None:
        super().__init__()
        param = nn.Parameter(torch.zeros(shape))
        if partition is not None:
            param.partition = partition
        self.register_parameter(name, param)


PIECES = {
    "plain torch parameter": ((5, 3), None, [Piece("part", (5, 3), (0, 0), 5, 0, 5)]),
    "one number": ((), None, [Piece("part", (), (), 1, 0, 1)]),
    "whole": ((8,), Partition((8,)), [Piece("part", (8,), (0,), 8, 0, 8)]),
    "rows": ((4, 3), Partition((12, 3), dim=0, index=2, count=3), [Piece("part", (12, 3), (8, 0), 4, 0, 4)]),
    "elements": ((4,), Partition((12,), dim=0, index=1, count=3), [Piece("part", (12,), (4,), 4, 0, 4)]),
    "columns": ((4, 3), Partition((4, 9), dim=1, index=2, count=3), [Piece("part", (4, 9), (0, 6), 4, 0, 4)]),
    "gated weight": (
        (6, 5),
        Partition((12, 5), dim=0, index=1, count=2, gated=True),
        [Piece("part_gate", (6, 5), (3, 0), 3, 0, 3), Piece("part_up", (6, 5), (3, 0), 3, 3, 3)],
    ),
    "gated bias": (
        (6,),
        Partition((12,), dim=0, index=0, count=2, gated=True),
        [Piece("part_gate", (6,), (0,), 3, 0, 3), Piece("part_up", (6,), (0,), 3, 3, 3)],
    ),
    "no padding here": (
        (4, 3),
        Partition((12, 3), dim=0, index=0, count=3, valid=9),
        [Piece("part", (9, 3), (0, 0), 4, 0, 4)],
    ),
    "some padding": (
        (4, 3),
        Partition((12, 3), dim=0, index=2, count=3, valid=9),
        [Piece("part", (9, 3), (8, 0), 1, 0, 4)],
    ),
    "padding only": (
        (4, 3),
        Partition((16, 3), dim=0, index=3, count=4, valid=9),
        [Piece("part", (9, 3), (9, 0), 0, 0, 4)],
    ),
}


@pytest.mark.parametrize(("shape", "partition", "expected"), PIECES.values(), ids=PIECES.keys())
def test_pieces(shape: tuple[int, ...], partition: Partition | None, expected: list[Piece]) -> None:
    module = Holder(shape, partition)
    name_parameters(module, tp_size=4)
    assert list(info_of(module.part).pieces) == expected


@pytest.mark.parametrize("partition", [PIECES["rows"][1], PIECES["gated weight"][1], PIECES["some padding"][1]])
def test_the_pieces_of_all_ranks_cover_a_parameter_once(partition: Partition) -> None:
    covered: dict[str, torch.Tensor] = {}
    local_rows = partition.global_shape[0] // partition.count
    for index in range(partition.count):
        own = Partition(**{**vars(partition), "index": index})
        module = Holder((local_rows, partition.global_shape[1]), own)
        name_parameters(module, tp_size=partition.count)
        pieces = info_of(module.part).pieces
        assert [piece.local_start for piece in pieces] == [0, *(piece.local_rows for piece in pieces[:-1])]
        assert sum(piece.local_rows for piece in pieces) == local_rows
        for piece in pieces:
            whole = covered.setdefault(piece.name, torch.zeros(piece.global_shape))
            whole[piece.offset[0] : piece.offset[0] + piece.rows] += 1
    for name, counts in covered.items():
        assert torch.equal(counts, torch.ones_like(counts)), name


FLAGS = {
    "cut": (Partition((8, 3), dim=0, count=2), 2, {}),
    "whole": (Partition((4, 3)), 2, {"tp_duplicated": True}),
    "whole, one rank": (Partition((4, 3), partial_grad=True), 1, {}),
    "sequence parallel": (Partition((4, 3), partial_grad=True), 2, {"tp_duplicated": True, "tp_partial_grad": True}),
    "tied copy": (Partition((8, 3), dim=0, count=2, shared_copy=True), 2, {"shared_copy": True}),
}


@pytest.mark.parametrize(("partition", "tp_size", "expected"), FLAGS.values(), ids=FLAGS.keys())
def test_flags(partition: Partition, tp_size: int, expected: dict[str, bool]) -> None:
    module = Holder((4, 3), partition)
    name_parameters(module, tp_size=tp_size)
    info = info_of(module.part)
    found = {name: getattr(info, name) for name in ("tp_duplicated", "tp_partial_grad", "shared_copy")}
    assert found == {"tp_duplicated": False, "tp_partial_grad": False, "shared_copy": False, **expected}


@pytest.mark.parametrize(
    ("shape", "name", "decays"), [((4, 3), "weight", True), ((4,), "weight", False), ((4, 3), "bias", False)]
)
def test_weight_decay_is_for_matrices(shape: tuple[int, ...], name: str, decays: bool) -> None:
    module = nn.ModuleDict({"fc": Holder(shape, None, name)})
    name_parameters(module, tp_size=1)
    assert info_of(module["fc"].get_parameter(name)).weight_decay == decays


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_are_those_in_the_module_but_for_one_that_stands_for_another(wrapped: bool) -> None:
    copy = nn.Linear(2, 3, bias=False)
    copy.weight.partition = Partition((3, 2), stands_for=("copy.weight", "embedding.weight"))  # type: ignore[assignment]
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"17": nn.Linear(2, 3)}), "copy": copy})
    module = nn.ModuleDict({"inner": stage}) if wrapped else stage
    name_parameters(module, tp_size=1)
    names = [piece.name for param in module.parameters() for piece in info_of(param).pieces]
    before = "inner." if wrapped else ""
    assert names == [before + name for name in ("layers.17.weight", "layers.17.bias", "embedding.weight")]


def test_a_parameter_without_name_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="name_parameters"):
        info_of(nn.Parameter(torch.zeros(2)))
