"""The demo's steps: what is there is reused, what depends on a change is made again."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from tools.demo import Folder, Settings, Step, documents_done, run_steps, steps


class Kitchen:
    """Steps a, b, c that write files of their names, and a list of those made."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.inputs = {"a": "1", "b": "1", "c": "1"}
        self.broken = ""
        self.made: list[str] = []

    def run(self) -> list[str]:
        self.made.clear()
        run_steps(self.folder, [self.step(name) for name in self.inputs], Console(file=io.StringIO()))
        return list(self.made)

    def step(self, name: str) -> Step:
        def make(folder: Folder, progress: Progress) -> None:
            self.made.append(name)
            (folder.path / name).write_text(name)
            if name == self.broken:
                raise ValueError(name)

        return Step(name, name, self.inputs[name], (self.folder.path / name,), make)


def test_a_second_run_makes_nothing(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    assert kitchen.run() == ["a", "b", "c"]
    assert kitchen.run() == []


def test_a_change_is_followed_by_all_that_comes_after(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    kitchen.run()
    kitchen.inputs["b"] = "2"
    assert kitchen.run() == ["b", "c"]


def test_a_lost_product_is_made_again(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    kitchen.run()
    (tmp_path / "c").unlink()
    assert kitchen.run() == ["c"]


def test_a_step_that_failed_is_made_again_though_its_file_is_there(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    kitchen.broken = "b"
    with pytest.raises(ValueError, match="b"):
        kitchen.run()
    kitchen.broken = ""
    assert kitchen.run() == ["b", "c"]


def test_longer_training_keeps_the_data(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    short, long = steps(folder, Settings(train_iters=10)), steps(folder, Settings(train_iters=20))
    assert [one.name for one, other in zip(short, long, strict=True) if one.inputs != other.inputs] == ["model"]


def test_the_preprocess_tool_s_newest_count_is_read() -> None:
    assert documents_done("") == 0
    log = (
        "documents: 0 documents [00:00, ? documents/s]\rdocuments: 137 documents [00:08, 16.89 documents/s, 0.26 MB/s]"
    )
    assert documents_done(log) == 137
