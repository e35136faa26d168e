from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.checkpoint import (
    ALONE,
    ChannelPeers,
    CheckpointError,
    find_checkpoint,
    load_slices,
    read_rank_state,
    read_state,
    save_checkpoint,
)
from megatron_overlap.comm.channel import Channel
from megatron_overlap.comm.pending import Ledger
from megatron_overlap.tensor_parallel.parameter import NamedSlice
from megatron_overlap.timeline.spans import Lane, Recorder
from megatron_overlap.topology.process_groups import Group
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

SHAPES = {
    "matrix": ((11, 6), torch.float32),
    "half": ((7, 4), torch.bfloat16),
    "double": ((9,), torch.float64),
    "few": ((2, 3), torch.float32),
    "empty": ((0, 3), torch.float32),
}
SAVED_BY_LAST = ("tail", (3, 2), torch.float32)
SCALAR = ("steps", (), torch.float32)


def value_of(name, shape, dtype):
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float64) / 3 + len(name)).to(dtype).reshape(shape)


def row_cuts(rows, world):
    """Uneven: the first rank has most, later ones little or nothing."""
    cuts = [rows - rows // (2 + rank) for rank in range(world - 1)]
    return [0, *sorted(cuts), rows]


def own_slices(rank, world):
    """Matrices are cut along rows and, with an even world, along columns too (two column halves)."""
    halves = 2 if world % 2 == 0 else 1
    row_rank, column = divmod(rank, halves)
    for name, (shape, dtype) in SHAPES.items():
        whole = value_of(name, shape, dtype)
        if len(shape) == 1:
            cuts = row_cuts(shape[0], world)
            start, end = cuts[rank], cuts[rank + 1]
            yield NamedSlice(name, shape, (start,), whole[start:end])
            continue
        cuts = row_cuts(shape[0], world // halves)
        start, end = cuts[row_rank], cuts[row_rank + 1]
        columns = [0, shape[1] // 2, shape[1]] if halves == 2 else [0, shape[1]]
        left, right = columns[column], columns[column + 1]
        yield NamedSlice(name, shape, (start, left), whole[start:end, left:right])
    yield NamedSlice(SCALAR[0], (), (), value_of(*SCALAR), write=rank == 0)
    if rank == world - 1:
        name, shape, dtype = SAVED_BY_LAST
        yield NamedSlice(name, shape, (0, 0), value_of(name, shape, dtype))


def peers_of_all():
    if dist.get_world_size() == 1:
        return ALONE
    world = tuple(range(dist.get_world_size()))
    group = Group(world, dist.get_rank(), "gloo", dist.group.WORLD)
    return ChannelPeers(Channel(group, Lane.DP, Ledger(), Recorder(enabled=False)))


def save_slices(folder, iteration=5):
    peers = peers_of_all()
    slices = list(own_slices(peers.rank, peers.size))
    rank_state = {"rank": peers.rank}
    save_checkpoint(folder, iteration, slices, {"saved_by": peers.size}, rank_state=rank_state, peers=peers)


def check_loaded(folder, saved_by):
    peers = peers_of_all()
    path = find_checkpoint(folder)
    expected = list(own_slices(peers.rank, peers.size))
    found = [NamedSlice(s.name, s.global_shape, s.offset, torch.full_like(s.tensor, -1), s.write) for s in expected]
    load_slices(path, found, peers=peers)
    for want, have in zip(expected, found, strict=True):
        assert torch.equal(want.tensor, have.tensor), (want.name, want.offset)
    assert read_state(path) == {"saved_by": saved_by}
    own = read_rank_state(path, peers.rank, peers.size)
    assert own == ({"rank": peers.rank} if peers.size == saved_by else None)


@pytest.mark.parametrize("saved_by", [2, 3])
def test_saved_at_one_layout_loads_at_others(tmp_path, saved_by):
    run_ranks(saved_by, save_slices, (tmp_path,))
    assert len(list(tmp_path.glob("iter_0000005/*.safetensors"))) == saved_by
    for loaded_by in (1, 2, 4):
        run_ranks(loaded_by, check_loaded, (tmp_path, saved_by))


def save_alone(folder):
    peers = peers_of_all()
    if peers.rank == 0:
        save_checkpoint(folder, 5, list(own_slices(0, 1)), {"saved_by": 1}, rank_state={"rank": 0})


def test_saved_by_one_process_loads_on_four(tmp_path):
    run_ranks(1, save_alone, (tmp_path,))
    run_ranks(4, check_loaded, (tmp_path, 1))


def wants_more_on_rank_1(folder):
    peers = peers_of_all()
    names = ["matrix"] if peers.rank == 0 else ["matrix", "nowhere"]
    slices = [NamedSlice(name, (11, 6), (0, 0), torch.zeros(11, 6)) for name in names]
    try:
        load_slices(find_checkpoint(folder), slices, peers=peers)
    except CheckpointError as error:
        return str(error)


def test_an_error_of_one_rank_at_load_is_raised_on_all(tmp_path):
    run_ranks(2, save_slices, (tmp_path,))
    errors = run_ranks(3, wants_more_on_rank_1, (tmp_path,))
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"rank 1, loading {tmp_path}/iter_0000005: ")
    assert "nowhere: found nothing, wanted float32 [11, 6]" in errors[0]


def save_with_full_disk_on_rank_1(folder):
    """A limit on the size of files stands for the disk: writing ends with an error of the system."""
    peers = peers_of_all()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if peers.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        save_slices(folder, iteration=6)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_on_one_rank_ends_the_save_on_all(tmp_path):
    run_ranks(3, save_slices, (tmp_path,))
    errors = run_ranks(3, save_with_full_disk_on_rank_1, (tmp_path,))
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"rank 1, saving {tmp_path}/iter_0000006: ")
    assert "File too large" in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000005", "latest_checkpointed_iteration.txt"}
    run_ranks(2, check_loaded, (tmp_path, 3))


def save_where_only_rank_0_may(folder):
    try:
        save_slices(Path(folder) / "file")
    except CheckpointError as error:
        return str(error)


def test_a_folder_that_rank_0_cannot_make_is_an_error_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    errors = run_ranks(2, save_where_only_rank_0_may, (tmp_path,))
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 0, saving ")
    assert "FileExistsError" in errors[0]


def save_twice_the_same(folder):
    peers = peers_of_all()
    try:
        save_checkpoint(folder, 1, [NamedSlice("w", (4,), (0,), torch.zeros(4))], {}, peers=peers)
    except CheckpointError as error:
        return str(error)


def test_ranks_that_write_the_same_are_an_error(tmp_path):
    errors = run_ranks(2, save_twice_the_same, (tmp_path,))
    assert "w [4]: ranks overlap" in errors[1]


def die_while_saving(folder):
    peers = peers_of_all()
    if peers.rank == 1:
        raise SystemExit(3)
    save_slices(folder, iteration=6)


def test_a_rank_that_is_gone_leaves_the_former_checkpoint(tmp_path):
    run_ranks(2, save_slices, (tmp_path,))
    with pytest.raises(RankError):
        run_ranks(2, die_while_saving, (tmp_path,))
    run_ranks(2, check_loaded, (tmp_path, 2))


def save_on_own_disk(folder):
    """Every rank sees another folder under the same name, as nodes without a shared file system do."""
    peers = peers_of_all()
    disk = Path(folder) / str(peers.rank)
    (disk / "checkpoints" / ".saving_iter_0000005").mkdir(parents=True)
    before = Path.cwd()
    os.chdir(disk)
    try:
        save_slices("checkpoints")
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir(before)


def test_a_file_system_that_is_not_shared_is_noticed(tmp_path):
    errors = run_ranks(2, save_on_own_disk, (tmp_path,))
    assert len(set(errors)) == 1
    assert "model-00001.safetensors is missing; a checkpoint must be on a file system that all nodes share" in errors[0]
    assert list((tmp_path / "0" / "checkpoints").iterdir()) == []
