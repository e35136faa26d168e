"""The demo's steps: what is there is reused, what depends on a change is made again."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from tools import demo
from tools.demo import Folder, Settings, Step, documents_done, resume_flags, run_steps, steps


class Kitchen:
    """Steps a, b, c that write files of their names, and a list of those made."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder(path)
        self.inputs = {"a": "1", "b": "1", "c": "1"}
        self.broken = ""
        self.cleared: list[str] = []
        self.made: list[str] = []

    def run(self) -> list[str]:
        self.made.clear()
        self.cleared.clear()
        run_steps(self.folder, [self.step(name) for name in self.inputs], Console(file=io.StringIO()))
        return list(self.made)

    def step(self, name: str) -> Step:
        def make(folder: Folder, progress: Progress) -> None:
            self.made.append(name)
            (folder.path / name).write_text(name)
            if name == self.broken:
                raise ValueError(name)

        def clear(folder: Folder) -> None:
            self.cleared.append(name)

        return Step(name, name, self.inputs[name], (self.folder.path / name,), make, clear)


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


def test_a_step_that_was_stopped_goes_on_unless_its_inputs_changed(tmp_path: Path) -> None:
    kitchen = Kitchen(tmp_path)
    kitchen.broken = "b"
    for inputs, cleared in (("1", ["a", "b"]), ("1", []), ("2", ["b"])):
        kitchen.inputs["b"] = inputs
        with pytest.raises(ValueError, match="b"):
            kitchen.run()
        assert kitchen.cleared == cleared
    kitchen.broken = ""
    kitchen.run()
    assert kitchen.cleared == ["c"]
    (tmp_path / "b").unlink()
    kitchen.run()
    assert kitchen.cleared == ["b"]  # what is lost after the end is made from its beginning


def test_a_run_that_only_lacks_its_evaluation_goes_one_checkpoint_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert resume_flags(folder, Settings(train_iters=100)) == []
    for saved in ("iter_0000040", "iter_0000080", "iter_0000100"):
        (folder.checkpoint / saved).mkdir(parents=True)
    folder.tracker.write_text("80")
    assert resume_flags(folder, Settings(train_iters=100)) == []
    folder.tracker.write_text("100")
    assert resume_flags(folder, Settings(train_iters=100)) == ["--ckpt-step", "80"]
    folder.tracker.write_text("40")
    assert resume_flags(folder, Settings(train_iters=40)) == []
    assert not folder.checkpoint.exists()


def test_the_demo_starts_by_its_path(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(demo.__file__)), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--train-iters" in done.stdout


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
