from __future__ import annotations

import io
import json
import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from megatron_overlap.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_slices,
    read_rank_state,
    read_state,
    save_checkpoint,
    stored_tensors,
)
from megatron_overlap.tensor_parallel.parameter import NamedSlice


def whole(name, tensor, write=True):
    return NamedSlice(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, write)


def part(name, shape, offset, tensor):
    return NamedSlice(name, shape, offset, tensor)


TENSORS = {
    "float": torch.randn(5, 3),
    "bfloat": torch.randn(7).to(torch.bfloat16),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "scalar": torch.tensor(12.5),
    "count": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path, 100, [whole(n, t) for n, t in TENSORS.items()], {"iteration": 100, "lr": 1e-3})
    return tmp_path / "iter_0000100"


def test_names_are_those_that_scripts_know(tmp_path, saved):
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
    assert find_checkpoint(tmp_path) == saved
    assert {path.name for path in tmp_path.iterdir()} == {"latest_checkpointed_iteration.txt", "iter_0000100"}


def test_everything_comes_back(saved):
    targets = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    load_slices(saved, [whole(name, tensor) for name, tensor in targets.items()])
    for name, tensor in TENSORS.items():
        assert torch.equal(targets[name], tensor), name
    assert read_state(saved) == {"iteration": 100, "lr": 1e-3}
    stored = stored_tensors(saved)
    assert (stored["bfloat"].dtype, stored["bfloat"].shape) == ("bfloat16", (7,))
    assert stored.keys() == TENSORS.keys()


def test_parameters_and_views_are_filled_in_place(saved):
    parameter = torch.nn.Parameter(torch.zeros(5, 3))
    flat = torch.zeros(20)
    column = part("float", (5, 3), (0, 1), torch.zeros(3, 5).t()[:, 1:3])
    load_slices(saved, [whole("float", parameter), part("float", (5, 3), (1, 0), flat[4:10].view(2, 3)), column])
    assert torch.equal(parameter.detach(), TENSORS["float"])
    assert torch.equal(flat[4:10].view(2, 3), TENSORS["float"][1:3])
    assert flat[:4].eq(0).all()
    assert flat[10:].eq(0).all()
    assert torch.equal(column.tensor, TENSORS["float"][:, 1:])


def test_views_of_one_buffer_are_saved_as_what_they_show(tmp_path):
    flat = torch.arange(20.0)
    slices = [whole("a", flat[:6].view(2, 3)), whole("b", flat[6:].view(7, 2)[:, :1]), whole("c", flat[18:])]
    save_checkpoint(tmp_path, 1, slices, {})
    loaded = [torch.zeros(2, 3), torch.zeros(7, 1), torch.zeros(2)]
    load_slices(tmp_path / "iter_0000001", [whole(n, t) for n, t in zip("abc", loaded, strict=True)])
    for before, after in zip(slices, loaded, strict=True):
        assert torch.equal(before.tensor, after)


def test_what_does_not_fit_is_named_with_both_sides(saved):
    wanted = [
        whole("float", torch.zeros(5, 4)),
        whole("bfloat", torch.zeros(7)),
        whole("unknown", torch.zeros(2)),
        whole("scalar", torch.zeros(())),
    ]
    with pytest.raises(CheckpointError) as error:
        load_slices(saved, wanted)
    assert str(error.value).splitlines()[1:] == [
        "  float: found float32 [5, 3], wanted float32 [5, 4]",
        "  bfloat: found bfloat16 [7], wanted float32 [7]",
        "  unknown: found nothing, wanted float32 [2]",
    ]
    assert wanted[0].tensor.eq(0).all()


def test_a_hole_is_an_error_at_save(tmp_path):
    hole = [part("w", (8, 2), (3, 0), torch.zeros(5, 2)), whole("b", torch.zeros(2))]
    with pytest.raises(CheckpointError, match=r"w \[8, 2\]: part of it is written by no rank"):
        save_checkpoint(tmp_path, 1, hole, {})
    assert list(tmp_path.iterdir()) == []


def test_a_hole_is_an_error_at_load(saved):
    metadata = json.loads((saved / "metadata.json").read_text())
    metadata["tensors"]["float"]["parts"][0][1] = [4, 3]
    (saved / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"float: found only parts of \[0:5, 0:3\]"):
        load_slices(saved, [whole("float", torch.zeros(5, 3))])


def test_two_rectangles_of_one_name_are_not_saved(tmp_path):
    two = [part("w", (4,), (0,), torch.zeros(2)), part("w", (4,), (2,), torch.zeros(2))]
    with pytest.raises(CheckpointError, match=r"AssertionError.*w"):
        save_checkpoint(tmp_path, 1, two, {})


def test_a_rectangle_outside_its_tensor_is_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"AssertionError.*w"):
        save_checkpoint(tmp_path, 1, [part("w", (4,), (3,), torch.zeros(2))], {})


def test_replicas_are_loaded_and_not_written(tmp_path):
    save_checkpoint(tmp_path, 1, [whole("w", torch.ones(2)), whole("w", torch.zeros(2), write=False)], {})
    replica = torch.zeros(2)
    load_slices(tmp_path / "iter_0000001", [whole("w", replica, write=False)])
    assert replica.eq(1).all()


def test_no_file_is_a_pickle_and_nothing_unpickles(saved, monkeypatch):
    for path in saved.iterdir():
        assert path.suffix in {".safetensors", ".json"}
        with pytest.raises(ValueError, match=r"opcode|stack|pickle"):
            pickletools.dis(path.read_bytes(), out=io.StringIO())

    def refuse(*_args, **_kwargs):
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_slices(saved, [whole("float", torch.zeros(5, 3))])
    read_state(saved)


def load_all(path):
    load_slices(path, [whole("float", torch.zeros(5, 3))])
    read_state(path)


class MakesAFile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "name", ["model_optim_rng.pt", ".metadata", "metadata.json", "state.json", "model-00000.safetensors"]
)
def test_a_pickle_in_place_of_any_file_does_not_run(tmp_path, saved, name):
    marker = tmp_path / "marker"
    if not (saved / name).exists():
        for path in saved.iterdir():
            path.unlink()
    (saved / name).write_bytes(pickle.dumps(MakesAFile(marker)))
    with pytest.raises(CheckpointError):
        load_all(saved)
    assert not marker.exists()


def test_a_folder_of_another_trainer_is_named_as_such(tmp_path):
    folder = tmp_path / "iter_0000005"
    (folder / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this trainer.*mp_rank_00.*converted"):
        load_slices(folder, [])


def test_short_and_missing_files_are_noticed(saved):
    shard = saved / "model-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"model-00000.safetensors has {len(content) - 1} bytes"):
        load_slices(saved, [])
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is missing"):
        load_slices(saved, [])


def test_the_index_cannot_point_out_of_the_folder(saved):
    text = (saved / "metadata.json").read_text()
    (saved / "metadata.json").write_text(text.replace("model-00000", "../model-00000"))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load_slices(saved, [whole("float", torch.zeros(5, 3))])


def test_state_of_a_rank_is_its_own_and_ends_with_the_layout(tmp_path):
    state = {"torch": torch.arange(4, dtype=torch.uint8)}
    save_checkpoint(tmp_path, 1, [], {}, rank_state=state)
    save_checkpoint(tmp_path, 2, [], {})
    assert torch.equal(read_rank_state(tmp_path / "iter_0000001", 0, 1)["torch"], state["torch"])
    assert read_rank_state(tmp_path / "iter_0000001", 0, 2) is None
    assert read_rank_state(tmp_path / "iter_0000002", 0, 1) is None


def test_state_that_is_no_json_is_an_error_and_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="cannot keep a object"):
        save_checkpoint(tmp_path, 1, [], {"bad": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_open_with_torch_distributed_checkpoint(saved):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items() if tensor.numel()}
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(saved)), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, TENSORS[name]), name
