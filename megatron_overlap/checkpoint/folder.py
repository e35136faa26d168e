"""The folder of a run's checkpoints: names, the tracker, and saves that are complete or absent.

latest_checkpointed_iteration.txt    the tracker: a decimal iteration, or the word release
iter_0000100/                        a complete checkpoint
.saving_iter_0000100/                one being written, or left over from a killed save
.replaced_iter_0000100/              the former one of a name that is being saved again
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
STATE = "state.json"
RANK_STATE = "rank_state.json"
RELEASE = "release"
FORMAT = "megatron_overlap"
FORMAT_VERSION = 1

_SAVING = ".saving_"
_MAX_DIGITS = 18
_REPLACED = ".replaced_"


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved, found or loaded; the text names the file and a way out."""


def checkpoint_name(iteration: int | str) -> str:
    """Folder name of an iteration; `release` names weights that belong to none."""
    if iteration == RELEASE:
        return RELEASE
    assert isinstance(iteration, int), iteration
    assert iteration >= 0, iteration
    return f"iter_{iteration:07d}"


def find_checkpoint(directory: str | os.PathLike[str], step: int | None = None) -> Path | None:
    """The checkpoint of iteration `step`, or the one the tracker names; None when there is no tracker."""
    root = Path(directory)
    if step is not None:
        return _existing(root, checkpoint_name(step), f"iteration {step} was asked for")
    tracker = root / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return _existing(root, RELEASE, f"{tracker} names it")
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r}, which is neither an iteration nor the word {RELEASE}. {_way_out(root)}"
        )
    return _existing(root, checkpoint_name(int(text)), f"{tracker} names it")


def complete_checkpoints(directory: str | os.PathLike[str]) -> list[int]:
    """Iterations of the complete checkpoints in a folder, in rising order."""
    names = (path.name.removeprefix("iter_") for path in Path(directory).glob("iter_*") if (path / METADATA).is_file())
    return sorted(int(name) for name in names if name.isdigit())


def _existing(root: Path, name: str, reason: str) -> Path:
    path = root / name
    if path.is_dir():
        return path
    # A save of the same iteration was killed between its two renames: the former one is still whole.
    former = root / f"{_REPLACED}{name}"
    if former.is_dir():
        return former
    raise CheckpointError(f"there is no checkpoint {path}, although {reason}. {_way_out(root)}")


def _way_out(root: Path) -> str:
    found = complete_checkpoints(root)
    if not found:
        return f"{root} has no complete checkpoint; remove {TRACKER} to start from the beginning."
    listed = ", ".join(map(str, found[-10:]))
    return (
        f"Complete checkpoints here: {listed}. Write one of these numbers into {root / TRACKER}, "
        f"pass it with --ckpt-step, or remove the tracker to start from the beginning."
    )


def read_json(path: Path) -> Any:
    """A JSON file of a checkpoint."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(_not_ours(path)) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Load another iteration with --ckpt-step.") from error


def _not_ours(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no checkpoint {folder}"
    names = sorted(entry.name for entry in folder.iterdir())[:5]
    return (
        f"{folder} is not a checkpoint of this trainer: it has no {path.name} "
        f"(found: {', '.join(names) or 'nothing'}). Files of other trainers must be converted first; they are not "
        "unpickled here."
    )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value))
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Bring a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saving_path(root: Path, name: str) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return root / f"{_SAVING}{name}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def begin_save(root: Path, name: str) -> Path:
    """Remove what killed saves left over and make an empty folder for the next one (rank 0)."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_SAVING}*"):
        _remove(leftover)
    for former in root.glob(f"{_REPLACED}*"):
        successor = root / former.name.removeprefix(_REPLACED)
        if successor.exists():
            _remove(former)
        else:
            former.rename(successor)
    path = saving_path(root, name)
    path.mkdir()
    return path


def publish(root: Path, name: str, tracker_text: str) -> None:
    """Give a written checkpoint its name, then point the tracker at it (rank 0)."""
    path = saving_path(root, name)
    sync_path(path)
    final = root / name
    former = root / f"{_REPLACED}{name}"
    if final.exists():
        final.rename(former)
    path.rename(final)
    sync_path(root)
    new_tracker = root / f".{TRACKER}"
    with new_tracker.open("w", encoding="utf-8") as file:
        file.write(tracker_text)
        file.flush()
        os.fsync(file.fileno())
    new_tracker.replace(root / TRACKER)
    sync_path(root)
    if former.exists():
        _remove(former)


def abandon_save(root: Path, name: str) -> None:
    """Remove a save that failed; what cannot be removed is left to the next save."""
    with contextlib.suppress(OSError):
        shutil.rmtree(saving_path(root, name))
