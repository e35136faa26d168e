"""What a local parameter is a part of: its rectangles of named global parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Piece:
    """A rectangle of a global parameter, held as a run of rows of a local tensor.

    `rows` of the run belong to the global parameter; the rest, up to `local_rows`, is padding that is never saved.
    A row of a 1-D parameter is one element.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    rows: int
    local_start: int
    local_rows: int


@dataclass(frozen=True)
class ParameterInfo:
    """Everything that the reducer, optimizer and checkpoint need to know of a local parameter.

    `tp_duplicated`: every tensor-parallel rank holds the same whole tensor. `tp_partial_grad`: its gradient is
    partial over tp (the sequence-parallel region) and is summed once per step. `shared_copy`: the tied output copy
    on the last stage, neither saved nor counted in the norm.
    """

    pieces: tuple[Piece, ...]
    tp_duplicated: bool
    tp_partial_grad: bool
    shared_copy: bool
    weight_decay: bool


@dataclass(frozen=True)
class NamedSlice:
    """What a checkpoint saves and loads: the rectangle at `offset` of a named global tensor.

    `write` is False where another rank writes the same rectangle; it is still loaded here.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    write: bool = True


@dataclass(frozen=True)
class Partition:
    """How a layer cut its parameter, known before the parameter has a name.

    `dim` is the dimension that is cut over tp (None: not cut), `index` of `count` the part held here. `gated` marks
    two stacked halves [gate; up], each cut by itself. `valid` is the true size of dim 0 where the rest is padding.
    `uses`: contributions to the gradient per microbatch. `tied`: one of two copies, on the first and the last stage.
    `stands_for`: the ending of the parameter's own name, and the one that takes its place in the global name.
    `fill(name)` gives the initial values as a function of the parameter's global position only.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    index: int = 0
    count: int = 1
    gated: bool = False
    valid: int | None = None
    partial_grad: bool = False
    shared_copy: bool = False
    uses: int = 1
    tied: bool = False
    stands_for: tuple[str, str] | None = None
    fill: Callable[[torch.Tensor, Piece], None] | None = None


def partition_of(param: nn.Parameter) -> Partition:
    """The partition that a layer attached; a plain torch parameter is whole on every tensor-parallel rank."""
    return getattr(param, "partition", None) or Partition(tuple(param.shape))


def info_of(param: nn.Parameter) -> ParameterInfo:
    """The info attached by `name_parameters`; AssertionError where that was not called."""
    info: ParameterInfo | None = getattr(param, "info", None)
    assert info is not None, "name_parameters() was not called on the module of this parameter"
    return info


def name_parameters(module: nn.Module, *, tp_size: int) -> None:
    """Attach a ParameterInfo to every parameter of `module`, from its partition and its name in the module.

    Names of the stage's parameters are the global ones, but for those that stand for another (the tied output copy
    bears the embedding's name).
    """
    for name, param in module.named_parameters():
        partition = partition_of(param)
        if partition.stands_for is not None:
            own, other = partition.stands_for
            name = name.removesuffix(own) + other
        param.info = ParameterInfo(  # type: ignore[attr-defined]
            pieces=_pieces(name, param, partition),
            tp_duplicated=partition.dim is None and tp_size > 1,
            tp_partial_grad=partition.partial_grad and tp_size > 1,
            shared_copy=partition.shared_copy,
            weight_decay=param.dim() > 1 and not name.endswith(".bias"),
        )


def _pieces(name: str, param: nn.Parameter, partition: Partition) -> tuple[Piece, ...]:
    shape = tuple(param.shape)
    if partition.gated:
        half = shape[0] // 2
        whole = (partition.global_shape[0] // 2, *partition.global_shape[1:])
        offset = (partition.index * half, *(0 for _ in shape[1:]))
        return tuple(
            Piece(f"{name}_{which}", whole, offset, half, start, half) for which, start in (("gate", 0), ("up", half))
        )
    offset = tuple(partition.index * size if dim == partition.dim else 0 for dim, size in enumerate(shape))
    whole, rows = partition.global_shape, shape[0] if shape else 1
    if partition.valid is not None:
        whole = (partition.valid, *whole[1:])
        rows = min(max(partition.valid - offset[0], 0), rows)
        offset = (min(offset[0], partition.valid), *offset[1:])
    return (Piece(name, whole, offset, rows, 0, shape[0] if shape else 1),)
