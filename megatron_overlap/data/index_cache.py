"""Index arrays on disk: written once under a hash of what they depend on, seen by every rank as a memory map."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Network file systems may show a new file to another machine only after some seconds.
VISIBLE_WITHIN_S = 30.0


@dataclass(frozen=True)
class IndexCache:
    """One set of named arrays in `directory`; `description` (JSON types) is what the arrays are a function of."""

    directory: Path
    label: str
    description: Mapping[str, Any]

    @property
    def _stem(self) -> str:
        digest = hashlib.md5(self._text().encode(), usedforsecurity=False).hexdigest()
        return f"{digest}-{self.label}"

    def path(self, name: str) -> Path:
        return self.directory / f"{self._stem}-{name}.npy"

    def holds(self, *names: str) -> bool:
        return all(self.path(name).is_file() for name in names)

    def store(self, **arrays: NDArray[Any]) -> None:
        """Write all arrays; each appears under its name by a rename, so nobody reads half of one."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write(self.directory / f"{self._stem}-description.txt", self._text().encode())
            for name, values in arrays.items():
                self._write(self.path(name), values)
        except OSError as error:
            raise ValueError(
                f"cannot write the index cache in {self.directory} ({error.strerror}): "
                "point --data-cache-path at a folder that can be written and that all ranks see"
            ) from error

    def load(self, *names: str) -> list[NDArray[Any]]:
        """Map the named arrays, waiting a bounded time for files that another machine has just written."""
        return [self._load(self.path(name)) for name in names]

    def _load(self, path: Path) -> NDArray[Any]:
        deadline = time.monotonic() + VISIBLE_WITHIN_S
        while not path.is_file():
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{path}: index file not found, though the building rank has written it: --data-cache-path "
                    f"(now {self.directory}) must be one folder that is shared by all ranks, on all machines"
                )
            time.sleep(0.1)
            if self.directory.is_dir():
                os.listdir(self.directory)  # makes a network file system look again
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: unreadable index file ({error}): remove it and start again") from error
        return array

    def _text(self) -> str:
        return json.dumps(dict(self.description), indent=2, sort_keys=True)

    def _write(self, path: Path, content: bytes | NDArray[Any]) -> None:
        # Two jobs may build the same cache at once: each writes its own file, and the last rename wins.
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    np.save(file, content, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
