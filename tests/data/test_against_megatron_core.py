"""Files and samples against megatron-core itself, where it is installed; `make campaign` installs it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_overlap.config import Config
from megatron_overlap.data.build import build_datasets
from megatron_overlap.data.gpt_index import plan_epochs
from megatron_overlap.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    merge_datasets,
)
from megatron_overlap.data.sample import NO_ID, SampleSource

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from megatron.core.datasets import indexed_dataset as theirs
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    except ImportError as error:
        pytest.skip(f"megatron.core cannot be imported: {error}", allow_module_level=True)

LENGTH, SEED, VOCAB = 16, 1234, 1000


@dataclass(frozen=True)
class Ids:
    """The tokenizer of both sides, as far as data sets look at it."""

    vocab_size: int = VOCAB
    eod: int = 7
    pad: int = NO_ID
    unique_identifiers: tuple[str, ...] = ("ids",)


@dataclass(frozen=True)
class Case:
    """Flags of a run of both sides."""

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

    @property
    def data(self) -> Case:
        return self

    @property
    def model(self) -> Any:
        return type("Model", (), {"seq_length": LENGTH})

    @property
    def training(self) -> Any:
        return type("Training", (), {"seed": SEED})


@pytest.fixture(autouse=True, scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """megatron-core asks for a process group before it writes a cache."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def our_datasets(case: Case, sizes: tuple[int, int, int]) -> Sequence[SampleSource | None]:
    return build_datasets(cast(Config, case), Ids(), sizes, True, lambda: None)


def their_datasets(case: Case, sizes: tuple[int, int, int]) -> Sequence[Any]:
    per_split = (case.train_data_path, case.valid_data_path, case.test_data_path)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=their_blend(case.data_path),
        blend_per_split=[their_blend(path) for path in per_split] if any(per_split) else None,
        split=case.split,
        path_to_cache=None if case.data_cache_path is None else f"{case.data_cache_path}_theirs",
        tokenizer=Ids(),
        reset_position_ids=case.reset_position_ids,
        reset_attention_mask=case.reset_attention_mask,
        eod_mask_loss=case.eod_mask_loss,
        create_attention_mask=case.reset_attention_mask,
    )
    kind = MockGPTDataset if case.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config).build()


def their_blend(path: tuple[str, ...]) -> tuple[list[str], list[float] | None] | None:
    if not path:
        return None
    if path[0].replace(".", "").isdigit():
        return list(path[1::2]), [float(weight) for weight in path[::2]]
    return list(path), None


def write_set(prefix: Path, seed: int, num_documents: int, longest: int = 40) -> str:
    """A set with empty documents and documents of several sequences among its documents."""
    source = random.Random(seed)
    with IndexedDatasetWriter(prefix, np.uint16, VOCAB) as writer:
        for _ in range(num_documents):
            lengths = [source.randrange(1, longest) for _ in range(source.choice([0, 1, 1, 1, 3]))]
            writer.add_document([source.randrange(VOCAB) for _ in range(sum(lengths))], lengths)
        writer.finalize()
    return str(prefix)


def assert_same(ours: Sequence[SampleSource | None], other: Sequence[Any]) -> int:
    """Every sample of every split, key by key; returns how many there were."""
    compared = 0
    for mine, their in zip(ours, other, strict=True):
        assert (mine is None) == (their is None)
        if mine is None:
            continue
        assert len(mine) == len(their)
        for number in range(len(mine)):
            sample, expected = mine[number], their[number]
            assert set(sample) == set(expected)
            for key, value in sample.items():
                found, right = torch.as_tensor(value), torch.as_tensor(expected[key])
                assert torch.equal(found, right.to(found.dtype)), (number, key)
            compared += 1
    return compared


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_either_side_reads_what_the_other_writes(tmp_path: Path, dtype: type) -> None:
    source = random.Random(5)
    documents = [[[source.randrange(60000) for _ in range(n)] for n in lengths] for lengths in ([3], [], [1, 4], [9])]
    mine = IndexedDatasetWriter(tmp_path / "ours", dtype)
    their = theirs.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=dtype)
    for document in documents:
        flat = [token for sequence in document for token in sequence]
        lengths = [len(sequence) for sequence in document]
        mine.add_document(flat, lengths)
        their.add_document(torch.tensor(flat, dtype=torch.int64), lengths)
    mine.finalize()
    their.finalize(str(idx_path(tmp_path / "theirs")))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()

    sequences = [sequence for document in documents for sequence in document]
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "theirs")] == sequences
    reader = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert [reader[number].tolist() for number in range(len(reader))] == sequences

    merge_datasets([tmp_path / "ours", tmp_path / "theirs"], tmp_path / "merged")
    builder = theirs.IndexedDatasetBuilder(str(bin_path(tmp_path / "their_merged")), dtype=dtype)
    builder.add_index(str(tmp_path / "ours"))
    builder.add_index(str(tmp_path / "theirs"))
    builder.finalize(str(idx_path(tmp_path / "their_merged")))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "merged").read_bytes() == path(tmp_path / "their_merged").read_bytes()


@pytest.mark.parametrize("share", [0.5, 1.0, 1.1, 1.7, 1.9, 2.0, 3.3, 3.95])
def test_same_samples_for_any_number_of_epochs(tmp_path: Path, share: float) -> None:
    prefix = write_set(tmp_path / "set", 1, 200)
    tokens = int(IndexedDataset(prefix).sequence_lengths.sum())
    wanted = int(share * ((tokens - 1) // LENGTH))
    plan = plan_epochs(tokens, LENGTH, wanted)
    assert plan.separate_final_epoch == (share in (1.1, 1.7, 3.3)), "the shares must cover both kinds of last epoch"
    case = Case((prefix,), split="1", data_cache_path=str(tmp_path / "cache"))
    assert (
        assert_same(our_datasets(case, (wanted, 0, 0)), [their_datasets(case, (wanted, 0, 0))[0], None, None]) >= wanted
    )


@pytest.mark.parametrize("split", ["969, 30, 1", "80,15,5", "1,1,1", "90,10,0"])
def test_same_splits(tmp_path: Path, split: str) -> None:
    case = Case((write_set(tmp_path / "set", 2, 1000, 10),), split=split, data_cache_path=str(tmp_path / "cache"))
    sizes = (500, 20, 10)
    assert assert_same(our_datasets(case, sizes), their_datasets(case, sizes)) >= 520


@pytest.mark.parametrize("weights", [(0.3, 0.7), (1, 1), (5e9, 2e9, 1e9), (0.001, 0.999), (1.0,)])
@pytest.mark.parametrize("wanted", [50, 1000])
def test_same_weighted_blends(tmp_path: Path, weights: Sequence[float], wanted: int) -> None:
    path: list[str] = []
    for number, weight in enumerate(weights):
        path += [f"{weight:.12f}", write_set(tmp_path / f"set{number}", number, 60)]
    case = Case(tuple(path), split="90,10", data_cache_path=str(tmp_path / "cache"))
    sizes = (wanted, 20, 0)
    assert assert_same(our_datasets(case, sizes), their_datasets(case, sizes)) >= wanted + 20


@pytest.mark.parametrize("wanted", [40, 100_000])
def test_same_blends_without_weights(tmp_path: Path, wanted: int) -> None:
    path = tuple(write_set(tmp_path / f"set{number}", number, size) for number, size in enumerate((30, 90, 50)))
    case = Case(path, split="90,10,0", data_cache_path=str(tmp_path / "cache"))
    sizes = (wanted, 10, 0)
    assert assert_same(our_datasets(case, sizes), their_datasets(case, sizes)) > 40


def test_same_data_sets_for_each_split(tmp_path: Path) -> None:
    sets = [write_set(tmp_path / f"set{number}", number, 60) for number in range(3)]
    case = Case(
        train_data_path=("0.25", sets[0], "0.75", sets[1]),
        valid_data_path=(sets[2],),
        data_cache_path=str(tmp_path / "cache"),
    )
    sizes = (300, 40, 0)
    assert assert_same(our_datasets(case, sizes), their_datasets(case, sizes)) >= 340


@pytest.mark.parametrize(
    "flags", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_same_sample_contents(tmp_path: Path, flags: tuple[int, int, int]) -> None:
    prefix = tmp_path / "set"
    source = random.Random(8)
    with IndexedDatasetWriter(prefix, np.uint16, VOCAB) as writer:
        for _ in range(100):
            writer.add_document([*(source.choice([3, 7, 11]) for _ in range(source.randrange(9))), Ids().eod])
        writer.finalize()
    case = Case(
        (str(prefix),),
        split="1",
        data_cache_path=str(tmp_path / "cache"),
        eod_mask_loss=bool(flags[0]),
        reset_position_ids=bool(flags[1]),
        reset_attention_mask=bool(flags[2]),
    )
    assert assert_same(our_datasets(case, (30, 0, 0)), their_datasets(case, (30, 0, 0))) >= 30


def test_same_mock_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours, other = our_datasets(Case(mock_data=True), (50, 5, 5)), their_datasets(Case(mock_data=True), (50, 5, 5))
    for mine, their in zip(ours, other, strict=True):
        assert mine is not None
        assert len(mine) == len(their)
        for number in (*range(40), len(mine) - 1):
            assert np.array_equal(mine[number]["tokens"], their[number]["tokens"].numpy())
