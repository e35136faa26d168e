"""Token file pairs: the bytes of the format, widths of ids, offsets beyond 32 bits, broken and half-written pairs."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    merge_datasets,
    read_index,
    token_dtype,
    write_index,
)

Documents = list[list[list[int]]]  # documents of sequences of ids


def write(prefix: Path, documents: Documents, vocab_size: int = 60000) -> Path:
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size), vocab_size) as writer:
        for document in documents:
            writer.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
        writer.finalize()
    return prefix


def expected_bytes(documents: Documents, code: int, letter: str) -> tuple[bytes, bytes]:
    """Both files, from the format's table alone."""
    sequences = [sequence for document in documents for sequence in document if sequence]
    itemsize = struct.calcsize(f"<{letter}")
    data = b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences)
    counts, offsets, start = [0], [], 0
    for document in documents:
        counts.append(counts[-1] + sum(1 for sequence in document if sequence))
    for sequence in sequences:
        offsets.append(start)
        start += len(sequence) * itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(counts))
    index += struct.pack(f"<{len(sequences)}i", *(len(s) for s in sequences))
    index += struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(counts)}q", *counts)
    return data, index


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.lists(st.integers(0, 59999), max_size=5), max_size=3), max_size=6))
def test_bytes_are_those_of_the_format(tmp_path_factory: pytest.TempPathFactory, documents: Documents) -> None:
    prefix = write(tmp_path_factory.mktemp("pair") / "set", documents)
    assert (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()) == expected_bytes(documents, 8, "H")
    dataset = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in dataset] == [s for document in documents for s in document if s]


@pytest.mark.parametrize("mmap", [True, False])
def test_parts_of_a_sequence(tmp_path: Path, mmap: bool) -> None:
    dataset = IndexedDataset(write(tmp_path / "set", [[[1, 2, 3], [4]], [[5, 6]]], 70000), mmap=mmap)
    assert dataset.dtype == np.int32
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(2).tolist() == [5, 6]
    assert dataset.largest_id(4) == 4
    with pytest.raises(IndexError, match="3 tokens"):
        dataset.get(0, 2, 2)


@pytest.mark.parametrize("vocab_size", [65499, 65500, 65536, 65537, 151936])
def test_ids_come_back_at_any_width(tmp_path: Path, vocab_size: int) -> None:
    ids = [token for token in (0, 65499, 65500, 65535, 65536, 151935) if token < vocab_size]
    dataset = IndexedDataset(write(tmp_path / "set", [[ids]], vocab_size))
    assert dataset[0].tolist() == ids
    assert dataset.dtype == (np.uint16 if vocab_size < 65500 else np.int32)


@pytest.mark.parametrize(("vocab_size", "token"), [(65499, 65499), (65500, 65500), (100, -1), (151936, 151936)])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, vocab_size: int, token: int) -> None:
    with pytest.raises(ValueError, match=f"document 0 holds token id {token}.*0 to {vocab_size - 1}"):
        write(tmp_path / "set", [[[0, token]]], vocab_size)
    assert list(tmp_path.iterdir()) == []


def test_ids_wider_than_the_file_are_refused_without_a_vocabulary(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "set", np.uint16)
    with pytest.raises(ValueError, match="token id 65536"):
        writer.add_document([65536])


@pytest.mark.filterwarnings("error")
def test_offsets_do_not_stop_at_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.full(3000, 1_000_000, dtype=np.int32)
    lengths[-1] = 1
    total = 2_999_000_001
    write_index(idx_path(tmp_path / "big"), np.int32, lengths, np.arange(3001))
    index = read_index(idx_path(tmp_path / "big"))
    assert int(index.offsets[-1]) == 2_999_000_000 * 4
    assert index.num_bytes == total * 4

    # Merging: a sparse .bin stands for the tokens, and copying it only adds its size.
    with bin_path(tmp_path / "big").open("wb") as file:
        file.truncate(total * 4)
    monkeypatch.setattr(shutil, "copyfileobj", lambda source, target, _: target.truncate(target.seek(total * 4, 1)))
    merge_datasets([tmp_path / "big", tmp_path / "big"], tmp_path / "merged")
    merged = read_index(idx_path(tmp_path / "merged"))
    assert int(merged.offsets[-1]) == (total + 2_999_000_000) * 4
    assert merged.documents.tolist() == list(range(6001))


def test_merged_sets_read_as_one_after_the_other(tmp_path: Path) -> None:
    first, second = [[[1, 2], [3]], []], [[[4]], [[5, 6, 7]]]
    write(tmp_path / "a", first)
    write(tmp_path / "b", second)
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    write(tmp_path / "whole", [*first, *second])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ab").read_bytes() == path(tmp_path / "whole").read_bytes()
    write(tmp_path / "wide", second, 70000)
    with pytest.raises(ValueError, match=r"wide.bin: holds int32 ids, the set it is merged into uint16"):
        merge_datasets([tmp_path / "a", tmp_path / "wide"], tmp_path / "mixed")


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


GOOD_BIN, GOOD_IDX = 22, 34 + 12 * 3 + 8 * 4  # 11 uint16 ids in 3 documents


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: cut(bin_path(p), GOOD_BIN - 1), "set.bin: expected 22 bytes .*found 21"),
        (lambda p: cut(bin_path(p), GOOD_BIN // 2), "set.bin: expected 22 bytes .*found 11"),
        (lambda p: bin_path(p).unlink(), "set.bin: no such file"),
        (lambda p: bin_path(p).write_bytes(b"\0" * 40), "set.bin: expected 22 bytes .*found 40"),
        (lambda p: cut(idx_path(p), GOOD_IDX - 8), f"set.idx: expected {GOOD_IDX} bytes .*found {GOOD_IDX - 8}"),
        (lambda p: cut(idx_path(p), 0), "set.idx: expected at least 34 bytes of header, found a file of 0"),
        (lambda p: idx_path(p).unlink(), "set.idx: no such file"),
        (lambda p: overwrite(idx_path(p), 0, b"TNTIDX"), "set.idx: not a token index: expected .*MMIDIDX.*TNTIDX"),
        (lambda p: overwrite(idx_path(p), 9, b"\x02"), "set.idx: expected index version 1, found 2"),
        (lambda p: overwrite(idx_path(p), 17, b"\x09"), "set.idx: expected a dtype code .*found 9"),
        (lambda p: overwrite(idx_path(p), 17, b"\x04"), "set.idx: damaged: sequences do not follow"),
        (lambda p: overwrite(idx_path(p), 34 + 12 * 3 + 8 * 3, b"\x02"), "set.idx: expected document entries"),
        (lambda p: idx_path(p).open("ab").write(b"\0\0\0"), "set.idx: .*multimodal"),
    ],
)
def test_broken_pairs_are_refused_with_file_and_sizes(tmp_path: Path, damage: object, words: str) -> None:
    prefix = write(tmp_path / "set", [[[1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]])
    assert len(IndexedDataset(prefix)) == 3
    assert callable(damage)
    damage(prefix)
    with pytest.raises(ValueError, match=words):
        IndexedDataset(prefix)


def test_a_pair_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [[[1]]])
    writer = IndexedDatasetWriter(prefix, np.uint16)
    writer.add_document([7, 8])
    assert IndexedDataset(prefix)[0].tolist() == [1]  # a writer that dies here leaves the old pair
    writer.finalize()
    assert IndexedDataset(prefix)[0].tolist() == [7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_two_writers_of_one_prefix_do_not_mix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = IndexedDatasetWriter(tmp_path / "set", np.uint16)
    second = IndexedDatasetWriter(tmp_path / "set", np.uint16)
    assert "set.bin" in caplog.text
    assert ".partial was left by an interrupted run" in caplog.text
    first.add_document([1, 2, 3])
    second.add_document([4])
    first.finalize()
    assert IndexedDataset(tmp_path / "set")[0].tolist() == [1, 2, 3]
    second.finalize()
    assert IndexedDataset(tmp_path / "set")[0].tolist() == [4]


@pytest.mark.parametrize(
    ("place", "message"), [("length", "negative length|follow each other"), ("offset", "follow"), ("document", "order")]
)
def test_entries_that_contradict_each_other_are_refused(place: str, message: str, tmp_path: Path) -> None:
    prefix = tmp_path / "set"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in (3, 2, 4):
            writer.add_document(range(length))
        writer.finalize()
    path = idx_path(prefix)
    raw = bytearray(path.read_bytes())
    header = len(raw) - 12 * 3 - 8 * 4
    raw[header + {"length": 3, "offset": 4 * 3 + 8, "document": 12 * 3 + 8 + 1}[place]] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"{path}: damaged: .*({message})"):
        read_index(path)
