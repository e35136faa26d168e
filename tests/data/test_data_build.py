"""From data flags to data sets: splits, blends, index files, and ranks that start together."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron_overlap.config import Config
from megatron_overlap.data import index_cache
from megatron_overlap.data.build import Datasets, build_datasets
from megatron_overlap.data.gpt_dataset import GPTDataset
from megatron_overlap.data.indexed_dataset import IndexedDatasetWriter
from megatron_overlap.data.sample import SampleSource
from megatron_overlap.data.splits import parse_split
from megatron_overlap.data.tokenizer import NullTokenizer
from tests.data import oracle

LENGTH, SEED, VOCAB = 8, 1234, 20_000


@dataclass(frozen=True)
class Data:
    data_path: tuple[str, ...] = ()
    split: str | None = None
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    data_cache_path: str | None = None
    mock_data: bool = False
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


@dataclass(frozen=True)
class Model:
    seq_length: int = LENGTH


@dataclass(frozen=True)
class Training:
    seed: int = SEED


@dataclass(frozen=True)
class Settings:
    """The part of a Config that data sets are built from."""

    data: Data
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)


def build(
    data: Data,
    num_samples: tuple[int, int, int],
    *,
    vocab_size: int = VOCAB,
    length: int = LENGTH,
    builder: bool = True,
) -> Datasets:
    config = cast(Config, Settings(data, Model(length)))
    train, valid, test = num_samples
    return build_datasets(config, NullTokenizer(vocab_size), (train, valid, test), builder, lambda: None)


def make_set(prefix: Path, num_sequences: int, first: int = 0) -> list[list[int]]:
    """A pair of files in which sequence k has k % 7 + 1 tokens, all different."""
    sequences = []
    with IndexedDatasetWriter(prefix, np.uint16, VOCAB) as writer:
        for number in range(num_sequences):
            sequences.append(list(range(first, first + number % 7 + 1)))
            first += number % 7 + 1
            writer.add_document(sequences[-1])
        writer.finalize()
    return sequences


def texts(dataset: SampleSource | None) -> list[list[int]]:
    assert dataset is not None
    samples = [dataset[number] for number in range(len(dataset))]
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


def test_each_split_reads_its_own_sequences_in_the_documented_order(tmp_path: Path) -> None:
    sequences = make_set(tmp_path / "set", 50)
    datasets = build(Data((str(tmp_path / "set"),), split="80,15,5"), (60, 5, 2))
    parts = [(0, 40, 60), (40, 48, 5), (48, 50, 2)]  # the border at 47.5 rounds to even
    for dataset, (begin, end, wanted) in zip(datasets, parts, strict=True):
        assert texts(dataset) == oracle.gpt_texts(sequences[begin:end], LENGTH, wanted, SEED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.bin", "set.idx"]
    names = {path.name.split("-", 1)[1] for path in (tmp_path / "set" / "cache" / "GPTDataset_indices").iterdir()}
    assert "GPTDataset-train-sample_index.npy" in names
    assert "GPTDataset-valid-description.txt" in names
    assert len(names) == 12


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("100,0,0", [(0, 1), None, None]),
        ("1", [(0, 1), None, None]),
        ("969, 30, 1", [(0, 0.969), (0.969, 0.999), (0.999, 1)]),
        ("0/1/1", [None, (0, 0.5), (0.5, 1)]),
        (".5 .25 .25", [(0, 0.5), (0.5, 0.75), (0.75, 1)]),
    ],
)
def test_split_text(text: str, shares: Sequence[Any]) -> None:
    found = parse_split(text)
    assert [share and pytest.approx(share) for share in shares] == found


@pytest.mark.parametrize("text", ["", "a", "0,0,0", "1,1,1,1"])
def test_wrong_split_text(text: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


@pytest.mark.parametrize("weights", [(1, 3), (0.001, 0.999), (0.5, 0.5), (2e9, 1e9)])
@pytest.mark.parametrize("wanted", [1, 37, 400])
def test_a_weighted_blend_never_runs_out(tmp_path: Path, weights: tuple[float, float], wanted: int) -> None:
    sets = [make_set(tmp_path / "a", 20), make_set(tmp_path / "b", 30, first=10_000)]
    flag = (str(weights[0]), str(tmp_path / "a"), str(weights[1]), str(tmp_path / "b"))
    train, _, _ = build(Data(flag, split="1", data_cache_path=str(tmp_path / "cache")), (wanted, 0, 0))
    sizes, size = oracle.blend_sizes(weights, wanted)
    order = oracle.blend(weights, size)
    needed = [max(size, sum(1 for member, _ in order if member == number)) for number, size in enumerate(sizes)]
    parts = [oracle.gpt_texts(sequences, LENGTH, n, SEED) for sequences, n in zip(sets, needed, strict=True)]
    assert texts(train) == [parts[member][sample] for member, sample in order]


def test_sets_without_weights_are_read_once(tmp_path: Path) -> None:
    sets = [make_set(tmp_path / "a", 20), make_set(tmp_path / "b", 30, first=10_000)]
    flag = (str(tmp_path / "a"), str(tmp_path / "b"))
    parts = [oracle.gpt_texts(sequences, LENGTH, None, SEED) for sequences in sets]
    sizes = [len(part) for part in parts]
    train, _, _ = build(Data(train_data_path=flag), (10_000, 0, 0))
    assert texts(train) == [parts[member][sample] for member, sample in oracle.blend(sizes, sum(sizes))]
    train, _, _ = build(Data(train_data_path=flag), (5, 0, 0))
    assert texts(train) == [parts[member][sample] for member, sample in oracle.blend(sizes, 5)]


def test_splits_without_samples_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_set(tmp_path / "set", 6)
    data = Data((str(tmp_path / "set"),))  # 969, 30, 1 of 6 sequences leaves none for validation and test
    train, valid, test = build(data, (10, 3, 3))
    assert train is not None
    assert (valid, test) == (None, None)
    assert "left out of the valid split, for which it has 0 sequences" in caplog.text
    assert build(Data(valid_data_path=data.data_path), (0, 3, 0))[1] is not None
    with pytest.raises(ValueError, match="nothing to train on: --split"):
        build(Data(data.data_path, split="0,1,0"), (10, 3, 0))


def test_one_empty_member_is_left_out_of_a_blend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sequences = make_set(tmp_path / "a", 20)
    make_set(tmp_path / "b", 1, first=10_000)
    train, _, _ = build(Data((str(tmp_path / "a"), str(tmp_path / "b")), split="1"), (100, 0, 0))
    assert texts(train) == oracle.gpt_texts(sequences, LENGTH, 100, SEED)
    assert f"{tmp_path / 'b'}: left out of the train split, for which it has 1 sequences with 1 tokens" in caplog.text


def test_ids_that_the_vocabulary_lacks_are_named_at_start(tmp_path: Path) -> None:
    make_set(tmp_path / "set", 20)
    with pytest.raises(ValueError, match=r"set.bin: holds token id 76, but the vocabulary has ids 0 to 50"):
        build(Data((str(tmp_path / "set"),), split="1"), (10, 0, 0), vocab_size=50)


def test_mock_data_needs_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, valid, test = build(Data(mock_data=True), (20, 5, 5), vocab_size=50, length=2048)
    for dataset, begin in zip((train, valid, test), (0, 33333, 66667), strict=True):
        assert isinstance(dataset, GPTDataset)
        assert int(dataset.index.document.min()) == begin
        assert dataset[0]["tokens"].max() <= 50
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_used_again_and_not_for_other_data(tmp_path: Path) -> None:
    make_set(tmp_path / "set", 20)
    data = Data((str(tmp_path / "set"),), split="1", data_cache_path=str(tmp_path / "cache"))
    first = texts(build(data, (30, 0, 0))[0])
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert texts(build(data, (30, 0, 0))[0]) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == written
    sequences = make_set(tmp_path / "set", 21)
    assert texts(build(data, (30, 0, 0))[0]) == oracle.gpt_texts(sequences, LENGTH, 30, SEED)


def test_a_cache_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_set(tmp_path / "set", 20)
    monkeypatch.setattr(index_cache, "VISIBLE_WITHIN_S", 0.0)
    data = Data((str(tmp_path / "set"),), split="1", data_cache_path=str(tmp_path / "other_machine"))
    with pytest.raises(ValueError, match=r"index file not found.*--data-cache-path.*must be one folder"):
        build(data, (30, 0, 0), builder=False)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    make_set(tmp_path / "set", 20)
    (tmp_path / "file").write_text("")
    data = Data((str(tmp_path / "set"),), split="1", data_cache_path=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot write the index cache in .*file \(.*\): point --data-cache-path"):
        build(data, (30, 0, 0))


def test_a_damaged_index_file_is_named(tmp_path: Path) -> None:
    make_set(tmp_path / "set", 20)
    data = Data((str(tmp_path / "set"),), split="1", data_cache_path=str(tmp_path / "cache"))
    build(data, (30, 0, 0))
    path = next((tmp_path / "cache").glob("*sample_index.npy"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"sample_index.npy: unreadable index file .* remove it"):
        build(data, (30, 0, 0))


def _start(job: int, rank: int, barriers: Sequence[Barrier], folder: str) -> None:
    data = Data((f"{folder}/set",), split="1", data_cache_path=f"{folder}/cache")
    for round_number, barrier in enumerate(barriers):
        barrier.wait(30)
        # A new number of samples each round: the cache holds nothing of it yet.
        train, _, _ = build_datasets(
            cast(Config, Settings(data)),
            NullTokenizer(VOCAB),
            (30 + round_number, 0, 0),
            rank == 0,
            lambda barrier=barrier: barrier.wait(30),  # type: ignore[misc]
        )
        Path(folder, f"read_{round_number}_{job}_{rank}.json").write_text(json.dumps(texts(train)))


def test_two_jobs_of_several_ranks_start_at_once_on_an_empty_cache(tmp_path: Path) -> None:
    sequences = make_set(tmp_path / "set", 20)
    context = multiprocessing.get_context("fork")
    barriers = {job: [context.Barrier(3) for _ in range(10)] for job in range(2)}
    processes = [
        context.Process(target=_start, args=(job, rank, barriers[job], str(tmp_path)))
        for job in range(2)
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for round_number in range(10):
        expected = oracle.gpt_texts(sequences, LENGTH, 30 + round_number, SEED)
        for path in tmp_path.glob(f"read_{round_number}_*.json"):
            assert json.loads(path.read_text()) == expected
    assert len(list(tmp_path.glob("read_*.json"))) == 60
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_file_that_shows_up_late_is_waited_for(tmp_path: Path) -> None:
    cache = index_cache.IndexCache(tmp_path / "cache", "late", {"n": 1})
    timer = threading.Timer(0.2, lambda: cache.store(values=np.arange(3)))
    timer.start()
    assert cache.load("values")[0].tolist() == [0, 1, 2]
    timer.join()
