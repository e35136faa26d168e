"""Saving and loading a checkpoint: named rectangles of tensors, and a state of plain values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_overlap.checkpoint import folder
from megatron_overlap.checkpoint.folder import CheckpointError
from megatron_overlap.checkpoint.json_state import from_json, to_json
from megatron_overlap.checkpoint.peers import ALONE, Peers, error_text, raise_failure, raise_together
from megatron_overlap.checkpoint.shards import (
    Index,
    build_index,
    check_request,
    index_from_json,
    index_to_json,
    read_slices,
    write_shard,
)
from megatron_overlap.tensor_parallel.parameter import NamedSlice

_MAX_LINES = 20


def save_checkpoint(
    directory: str | os.PathLike[str],
    iteration: int | str,
    slices: Sequence[NamedSlice],
    state: Mapping[str, Any],
    *,
    rank_state: Mapping[str, Any] | None = None,
    peers: Peers = ALONE,
) -> None:
    """Save on all ranks together; when this returns the checkpoint is whole and the tracker names it.

    `state` is rank 0's; `rank_state` is kept for each rank. An error on any rank is raised on all of them, and the
    checkpoints that were there before stay as they are.
    """
    root, name = Path(directory), folder.checkpoint_name(iteration)
    doing = f"saving {root / name}"
    _on_rank_0(peers, lambda: folder.begin_save(root, name), doing)
    error: Exception | None = None
    entry: dict[str, Any] = {}
    try:
        entry = write_shard(folder.saving_path(root, name), peers.rank, slices)
        entry["rank_state"] = to_json(rank_state)
    except Exception as caught:
        error = caught
        entry = {"error": error_text(caught)}
    entries = peers.gather_json(entry)
    failure: Any = None
    if peers.rank == 0:
        try:
            failure = next(((rank, e["error"]) for rank, e in enumerate(entries) if "error" in e), None)
            if failure is None:
                _complete(root, name, entries, state, tracker_text=str(iteration))
        except Exception as caught:
            error = caught
            failure = (0, error_text(caught))
        if failure is not None:
            folder.abandon_save(root, name)
    raise_failure(peers, peers.broadcast_json(failure), error, doing)


def _on_rank_0(peers: Peers, action: Callable[[], object], doing: str) -> None:
    error: Exception | None = None
    if peers.rank == 0:
        try:
            action()
        except Exception as caught:
            error = caught
    failure = peers.broadcast_json(None if error is None else (0, error_text(error)))
    raise_failure(peers, failure, error, doing)


def _complete(
    root: Path, name: str, entries: Sequence[dict[str, Any]], state: Mapping[str, Any], *, tracker_text: str
) -> None:
    """Write the index and the state, check that every file is there in its full size, then publish."""
    path = folder.saving_path(root, name)
    files = {entry["file"]: entry["bytes"] for entry in entries if entry["file"] is not None}
    metadata = {
        "sharded_backend": folder.FORMAT,
        "sharded_backend_version": folder.FORMAT_VERSION,
        "files": files,
        "tensors": index_to_json(build_index(entries)),
    }
    folder.write_json(path / folder.STATE, to_json(state))
    rank_states = [entry["rank_state"] for entry in entries]
    if any(item is not None for item in rank_states):
        folder.write_json(path / folder.RANK_STATE, rank_states)
    folder.write_json(path / folder.METADATA, metadata)
    _check_files(path, files)
    folder.publish(root, name, tracker_text)


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for file, wanted in files.items():
        # A name from a file that someone else may have written must not lead out of the folder.
        if Path(file).name != file:
            raise CheckpointError(f"{path / folder.METADATA}: {file!r} is not a plain file name")
        try:
            found = (path / file).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{path / file} is missing; a checkpoint must be on a file system that all nodes share"
            ) from None
        if found != wanted:
            raise CheckpointError(
                f"{path / file} has {found} bytes, expected {wanted}; load another iteration with --ckpt-step"
            )


def _read_index(path: Path) -> Index:
    metadata = folder.read_json(path / folder.METADATA)
    found = (metadata.get("sharded_backend"), metadata.get("sharded_backend_version"))
    wanted = (folder.FORMAT, folder.FORMAT_VERSION)
    if found != wanted:
        raise CheckpointError(f"{path / folder.METADATA}: found format {found[0]} version {found[1]}, wanted {wanted}")
    _check_files(path, metadata["files"])
    index = index_from_json(metadata["tensors"])
    unlisted = {part.file for stored in index.values() for part in stored.parts} - metadata["files"].keys()
    if unlisted:
        raise CheckpointError(f"{path / folder.METADATA}: tensors in files that are not listed: {sorted(unlisted)}")
    return index


def load_slices(path: str | os.PathLike[str], slices: Sequence[NamedSlice], *, peers: Peers = ALONE) -> None:
    """Fill the tensors of `slices` in place; each rank passes what it needs, whatever layout has saved it.

    Nothing is converted: name, global shape and dtype must be those of the checkpoint, and every element must be there.
    """
    error: Exception | None = None
    try:
        index = _read_index(Path(path))
        lines = check_request(index, slices)
        if lines:
            more = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
            problems = "\n  ".join([*lines[:_MAX_LINES], *more])
            raise CheckpointError(f"it does not fit this model:\n  {problems}")
        read_slices(Path(path), index, slices)
    except Exception as caught:
        error = caught
    raise_together(peers, error, f"loading {path}")


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state that rank 0 saved."""
    return from_json(folder.read_json(Path(path) / folder.STATE))


def read_rank_state(path: str | os.PathLike[str], rank: int, size: int) -> dict[str, Any] | None:
    """What this rank saved for itself; None when nothing was saved or the number of ranks has changed."""
    file = Path(path) / folder.RANK_STATE
    if not file.is_file():
        return None
    states = folder.read_json(file)
    return from_json(states[rank]) if len(states) == size else None


def stored_tensors(path: str | os.PathLike[str]) -> Index:
    """Shape, dtype and parts of every tensor in a checkpoint, by name."""
    return _read_index(Path(path))
