"""One safetensors file per rank, and the index that says which rectangle of which tensor is in which file.

The files have the form of torch.distributed.checkpoint's safetensors storage, so its reader opens them too.
The index is ours: it holds true shapes, so that a missing part is noticed and never left unfilled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_overlap.checkpoint.folder import CheckpointError, sync_path
from megatron_overlap.checkpoint.rectangles import Rectangle, count_cover, describe
from megatron_overlap.tensor_parallel.parameter import NamedSlice


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a tensor and the file that holds it under the tensor's name."""

    rectangle: Rectangle
    file: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` is torch's name without the prefix, such as `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredRectangle, ...]


Index = dict[str, StoredTensor]


def shard_file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"model-{rank:05d}.safetensors"


def rectangle_of(part: NamedSlice) -> Rectangle:
    """Where a slice lies in its global tensor."""
    rectangle = Rectangle(tuple(part.offset), tuple(part.tensor.shape))
    assert rectangle.inside(tuple(part.global_shape)), (part.name, rectangle, part.global_shape)
    return rectangle


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_shard(folder: Path, rank: int, slices: Sequence[NamedSlice]) -> dict[str, Any]:
    """Write a rank's rectangles, return its entry for the index: file, size in bytes and a list of rectangles.

    Empty rectangles and replicas are not written, and a rank with nothing else writes no file.
    """
    own = [part for part in slices if part.write and rectangle_of(part).numel > 0]
    tensors = {part.name: part.tensor.detach().cpu().contiguous() for part in own}
    # One file holds one rectangle per name: a second one would overwrite the first.
    assert len(tensors) == len(own), [p.name for p in own if sum(q.name == p.name for q in own) > 1]
    entry: dict[str, Any] = {
        "file": None,
        "bytes": 0,
        # Empty tensors have no rectangle anywhere, so their shape comes from here.
        "tensors": [
            [
                part.name,
                list(part.global_shape),
                dtype_name(part.tensor.dtype),
                list(part.offset),
                list(part.tensor.shape),
            ]
            for part in slices
            if part.write and (part.tensor.numel() > 0 or 0 in part.global_shape)
        ],
    }
    if own:
        path = folder / shard_file_name(rank)
        offsets = {part.name: {"saved_offsets": list(part.offset)} for part in own}
        save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})
        sync_path(path)
        entry |= {"file": path.name, "bytes": path.stat().st_size}
    return entry


def build_index(entries: Iterable[dict[str, Any]]) -> Index:
    """Join the entries of all ranks; every element of every tensor must have been written exactly once."""
    index: Index = {}
    for entry in entries:
        for name, shape, dtype, offset, part_shape in entry["tensors"]:
            part = Rectangle(tuple(offset), tuple(part_shape))
            seen = index.get(name, StoredTensor(tuple(shape), dtype, ()))
            if (seen.shape, seen.dtype) != (tuple(shape), dtype):
                raise CheckpointError(
                    f"{name}: one rank saves it as {seen.dtype} {list(seen.shape)}, another as {dtype} {shape}"
                )
            parts = (*seen.parts, StoredRectangle(part, entry["file"])) if part.numel else seen.parts
            index[name] = StoredTensor(seen.shape, seen.dtype, parts)
    for name, stored in index.items():
        whole = Rectangle((0,) * len(stored.shape), stored.shape)
        least, most = count_cover(whole, [part.rectangle for part in stored.parts])
        if (least, most) != (1, 1):
            fault = "part of it is written by no rank" if least == 0 else "ranks overlap"
            parts_text = ", ".join(f"{part.file} {describe(part.rectangle)}" for part in stored.parts)
            raise CheckpointError(f"{name} {list(stored.shape)}: {fault}; rectangles: {parts_text or 'none'}")
    return index


def index_to_json(index: Index) -> dict[str, Any]:
    return {
        name: {
            "shape": list(stored.shape),
            "dtype": stored.dtype,
            "parts": [[list(p.rectangle.offset), list(p.rectangle.shape), p.file] for p in stored.parts],
        }
        for name, stored in index.items()
    }


def index_from_json(value: dict[str, Any]) -> Index:
    return {
        name: StoredTensor(
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(
                StoredRectangle(Rectangle(tuple(offset), tuple(shape)), file) for offset, shape, file in entry["parts"]
            ),
        )
        for name, entry in value.items()
    }


def check_request(index: Index, slices: Sequence[NamedSlice]) -> list[str]:
    """One line per slice that the checkpoint cannot fill: what was found and what is wanted."""
    lines = []
    for part in slices:
        wanted_shape, wanted_dtype = tuple(part.global_shape), dtype_name(part.tensor.dtype)
        stored = index.get(part.name)
        if stored is None:
            lines.append(f"{part.name}: found nothing, wanted {wanted_dtype} {list(wanted_shape)}")
        elif (stored.shape, stored.dtype) != (wanted_shape, wanted_dtype):
            lines.append(
                f"{part.name}: found {stored.dtype} {list(stored.shape)}, wanted {wanted_dtype} {list(wanted_shape)}"
            )
        elif count_cover(rectangle_of(part), [other.rectangle for other in stored.parts])[0] == 0:
            lines.append(f"{part.name}: found only parts of {describe(rectangle_of(part))}, wanted all of it")
    return lines


def read_slices(folder: Path, index: Index, slices: Sequence[NamedSlice]) -> None:
    """Fill the slices from the files, opening each file once; `check_request` has passed."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for part in slices:
            target, target_rectangle = part.tensor.detach(), rectangle_of(part)
            for stored in index[part.name].parts:
                common = stored.rectangle.common(target_rectangle)
                if common is None:
                    continue
                if stored.file not in files:
                    files[stored.file] = stack.enter_context(_open_shard(folder / stored.file))
                values = _read_part(files[stored.file], part.name, stored.rectangle, common)
                assert values.dtype == target.dtype, (part.name, values.dtype)
                target[common.slices_within(target_rectangle)].copy_(values)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _read_part(file: Any, name: str, stored: Rectangle, wanted: Rectangle) -> torch.Tensor:
    if not stored.shape:
        return file.get_tensor(name)
    view = file.get_slice(name)
    if tuple(view.get_shape()) != stored.shape:
        raise CheckpointError(f"{name}: the index says {list(stored.shape)}, the file has {view.get_shape()}")
    return view[wanted.slices_within(stored)]
