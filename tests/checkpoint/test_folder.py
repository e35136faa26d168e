from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from megatron_overlap.checkpoint import (
    RELEASE,
    CheckpointError,
    complete_checkpoints,
    find_checkpoint,
    load_slices,
    read_state,
    save_checkpoint,
    shards,
)
from megatron_overlap.tensor_parallel.parameter import NamedSlice

TRACKER = "latest_checkpointed_iteration.txt"


def save(folder, iteration, value=None, numel=8):
    tensor = torch.full((numel,), float(iteration if value is None else value))
    save_checkpoint(folder, iteration, [NamedSlice("w", (numel,), (0,), tensor)], {"value": float(tensor[0])})


def loaded_value(folder, numel=8):
    """The value of the checkpoint that a restart would load, whole."""
    path = find_checkpoint(folder)
    tensor = torch.full((numel,), -1.0)
    load_slices(path, [NamedSlice("w", (numel,), (0,), tensor)])
    value = read_state(path)["value"]
    assert tensor.eq(value).all()
    return value


def test_without_a_tracker_there_is_nothing(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "missing") is None


def test_a_step_can_be_asked_for(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert find_checkpoint(tmp_path).name == "iter_0000020"
    assert find_checkpoint(tmp_path, step=10).name == "iter_0000010"
    with pytest.raises(CheckpointError, match=r"iter_0000030.*10, 20"):
        find_checkpoint(tmp_path, step=30)


def test_weights_that_belong_to_no_iteration(tmp_path):
    save_checkpoint(tmp_path, RELEASE, [], {"iteration": 0})
    assert (tmp_path / TRACKER).read_text() == "release"
    assert find_checkpoint(tmp_path) == tmp_path / "release"


@pytest.mark.parametrize("text", ["", "abc", "7", "-1", "10.5", "\u0661"])
def test_a_bad_tracker_is_an_error_with_a_way_out(tmp_path, text):
    save(tmp_path, 10)
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(tmp_path)
    for word in (TRACKER, "10", "--ckpt-step"):
        assert word in str(error.value)


def test_a_tracker_alone_says_how_to_start_again(tmp_path):
    (tmp_path / TRACKER).write_text("100\n")
    with pytest.raises(CheckpointError, match=r"iter_0000100.*no complete checkpoint; remove"):
        find_checkpoint(tmp_path)


def test_trailing_newline_is_fine(tmp_path):
    save(tmp_path, 10)
    (tmp_path / TRACKER).write_text("10\n")
    assert loaded_value(tmp_path) == 10


def test_leftovers_are_ignored_and_removed_by_the_next_save(tmp_path):
    save(tmp_path, 10)
    leftover = tmp_path / ".saving_iter_0000020"
    leftover.mkdir()
    (leftover / "model-00000.safetensors").write_bytes(b"half")
    assert loaded_value(tmp_path) == 10
    assert complete_checkpoints(tmp_path) == [10]
    save(tmp_path, 30)
    assert not leftover.exists()
    assert complete_checkpoints(tmp_path) == [10, 30]


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 10, value=1)
    save(tmp_path, 10, value=2)
    assert loaded_value(tmp_path) == 2
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000010"}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"NotADirectoryError.*file"):
        save(tmp_path / "file" / "checkpoints", 1)


class Killed(BaseException):
    """Stands for the end of the process: no handler of ordinary errors runs."""


def killed_at(monkeypatch, step, action):
    """Run `action` and end it just before its `step`-th change of the file system; whether it was ended."""
    counter = itertools.count()

    def counted(function):
        def call(*args, **kwargs):
            if next(counter) == step:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(lambda _: None))
        for owner, name in [(shutil, "rmtree"), (shards, "save_file")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        for name in ("mkdir", "rename", "replace", "open"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("iteration", [10, 20])
def test_killed_at_any_step_a_whole_checkpoint_stays(tmp_path, monkeypatch, iteration):
    seen = set()
    for step in itertools.count():
        folder = tmp_path / str(step)
        save(folder, 10, value=1)
        killed = killed_at(monkeypatch, step, lambda folder=folder: save(folder, iteration, value=2))
        seen.add(loaded_value(folder))
        if not killed:
            assert loaded_value(folder) == 2
            break
        # A restart may be killed while it tidies up.
        for second in itertools.count():
            again = tmp_path / f"{step}-{second}"
            shutil.copytree(folder, again)
            killed = killed_at(monkeypatch, second, lambda again=again: save(again, iteration, value=3))
            assert loaded_value(again) in ({1, 2, 3} if killed else {3})
            shutil.rmtree(again)
            if not killed:
                break
    assert step > 10
    assert seen == {1, 2}


def save_forever(folder):
    torch.set_num_threads(1)
    for step in itertools.count(2):
        # Every second save replaces the checkpoint that the tracker names.
        save(folder, step // 2, value=step, numel=200_000)


@pytest.mark.ranks
def test_killed_at_random_moments_a_whole_checkpoint_stays(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_worker"])
    moments = random.Random(1)
    value = 0
    for attempt in range(10):
        process = context.Process(target=save_forever, args=(tmp_path,), daemon=True)
        before = (tmp_path / TRACKER).stat().st_mtime_ns if attempt else 0
        process.start()
        try:
            deadline = time.monotonic() + 30
            while not (tmp_path / TRACKER).exists() or (tmp_path / TRACKER).stat().st_mtime_ns == before:
                assert time.monotonic() < deadline, "nothing was saved"
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.08))
        finally:
            process.kill()
            process.join(10)
        value = loaded_value(tmp_path, numel=200_000)
        assert value >= 2
    save(tmp_path, 10_000, numel=200_000)
    assert not list(tmp_path.glob(".*"))
