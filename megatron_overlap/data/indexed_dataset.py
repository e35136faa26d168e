"""Token files: a `.bin` of ids back to back and an `.idx` that says where each sequence starts."""

from __future__ import annotations

import glob
import logging
import os
import shutil
import struct
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences S, document entries D

DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
# Below this vocabulary size ids are stored in 16 bits; the gap to 65536 is Megatron's, and part of the format.
UINT16_VOCAB_LIMIT = 65500


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type in which the format stores ids of this vocabulary."""
    return DTYPE_CODES[8] if vocab_size < UINT16_VOCAB_LIMIT else DTYPE_CODES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def sequence_offsets(lengths: NDArray[Any], itemsize: int) -> NDArray[np.int64]:
    """Byte offset of every sequence; summed in 64 bits, since lengths are stored in 32."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= itemsize
    return offsets


@dataclass(frozen=True)
class SequenceIndex:
    """What an `.idx` file says: `lengths` int32 [S] tokens, `offsets` int64 [S] bytes, `documents` int64 [D]."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Size that the `.bin` file must have."""
        if len(self.lengths) == 0:
            return 0
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize


def write_index(path: Path, dtype: DTypeLike, lengths: ArrayLike, documents: ArrayLike) -> None:
    """Write an `.idx` file; entry k of `documents` is the number of sequences in the first k documents."""
    dtype = np.dtype(dtype)
    codes = [code for code, known in DTYPE_CODES.items() if known == dtype]
    if not codes:
        raise ValueError(f"{path}: token type {dtype} has no code in the index format")
    stored_lengths = np.asarray(lengths, dtype="<i4")
    stored_documents = np.asarray(documents, dtype="<i8")
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, codes[0], len(stored_lengths), len(stored_documents)))
        for part in (stored_lengths, sequence_offsets(stored_lengths, dtype.itemsize), stored_documents):
            file.write(part.data)
        file.flush()
        os.fsync(file.fileno())


_BLOCK_ENTRIES = 1 << 20


def read_index(path: Path) -> SequenceIndex:
    """Map an `.idx` file and check that its size agrees with its header, and its entries with each other."""
    size = _size_of(path)
    if size < HEADER.size:
        raise ValueError(f"{path}: expected at least {HEADER.size} bytes of header, found a file of {size} bytes")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_entries = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise ValueError(f"{path}: not a token index: expected it to start with {MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise ValueError(f"{path}: expected index version {VERSION}, found {version}")
    if code not in DTYPE_CODES or DTYPE_CODES[code].kind == "f":
        raise ValueError(f"{path}: expected a dtype code of an integer type (1-5 or 8), found {code}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if size == expected + num_sequences and num_sequences:
        raise ValueError(f"{path}: index of a multimodal set (one mode byte for each sequence), which is not supported")
    if size != expected:
        raise ValueError(
            f"{path}: expected {expected} bytes for {num_sequences} sequences and {num_entries} document entries, "
            f"found {size} bytes"
        )
    # The arrays are not 8-aligned in the file, which numpy's views of a byte buffer allow.
    lengths = np.frombuffer(raw, dtype="<i4", count=num_sequences, offset=HEADER.size)
    offsets = np.frombuffer(raw, dtype="<i8", count=num_sequences, offset=HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(raw, dtype="<i8", count=num_entries, offset=HEADER.size + 12 * num_sequences)
    if num_entries == 0 or documents[0] != 0 or documents[-1] != num_sequences:
        ends = (int(documents[0]), int(documents[-1])) if num_entries else "none"
        raise ValueError(f"{path}: expected document entries from 0 to {num_sequences}, found {ends}")
    if num_sequences and offsets[0] != 0:
        raise ValueError(f"{path}: expected the first sequence at byte 0 of the .bin file, found {int(offsets[0])}")
    _check_entries(path, lengths, offsets, documents, DTYPE_CODES[code].itemsize)
    return SequenceIndex(DTYPE_CODES[code], lengths, offsets, documents)


def _check_entries(
    path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], documents: NDArray[np.int64], itemsize: int
) -> None:
    """ValueError where the entries contradict each other, as in a damaged file; block by block, in little memory."""
    for start in range(0, len(lengths), _BLOCK_ENTRIES):
        block = slice(start, start + _BLOCK_ENTRIES)
        if (lengths[block] < 0).any():
            raise ValueError(f"{path}: damaged: a sequence has a negative length; make the pair of files anew")
        ends = offsets[block] + lengths[block].astype(np.int64) * itemsize
        following = offsets[start + 1 : start + 1 + len(ends)]
        if (ends[: len(following)] != following).any():
            raise ValueError(f"{path}: damaged: sequences do not follow each other; make the pair of files anew")
    for start in range(0, len(documents), _BLOCK_ENTRIES):
        if (np.diff(documents[start : start + _BLOCK_ENTRIES + 1]) < 0).any():
            raise ValueError(f"{path}: damaged: documents are out of order; make the pair of files anew")


class IndexedDataset:
    """Reader of one pair; sequence i is `dataset[i]`, in the type that the file stores."""

    def __init__(self, prefix: str | Path, mmap: bool = True) -> None:
        self.prefix = str(prefix)
        self.index = read_index(idx_path(prefix))
        path = bin_path(prefix)
        size = _size_of(path)
        if size != self.index.num_bytes:
            raise ValueError(
                f"{path}: expected {self.index.num_bytes} bytes ({self.num_tokens} ids of "
                f"{self.dtype.itemsize} bytes, says the .idx file), found {size} bytes"
            )
        # An empty file cannot be mapped.
        self._tokens = np.memmap(path, dtype=self.dtype, mode="r") if mmap and size else None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.index.dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return self.index.lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        return self.index.documents

    @property
    def num_tokens(self) -> int:
        return self.index.num_bytes // self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` tokens (all by default) of sequence `index` from token `offset` on."""
        stop = int(self.index.lengths[index])
        length = stop - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > stop:
            raise IndexError(f"{self.prefix}: sequence {index} has {stop} tokens, asked for {offset}+{length}")
        return self._read(int(self.index.offsets[index]) + offset * self.dtype.itemsize, length)

    def largest_id(self, num_tokens: int) -> int:
        """Largest id among the first `num_tokens` tokens of the file (-1 when it is empty)."""
        head = self._read(0, min(num_tokens, self.num_tokens))
        return int(head.max()) if len(head) else -1

    def _read(self, start: int, length: int) -> NDArray[Any]:
        if self._tokens is not None:
            first = start // self.dtype.itemsize
            return self._tokens[first : first + length]
        return np.fromfile(bin_path(self.prefix), dtype=self.dtype, count=length, offset=start)


class IndexedDatasetWriter:
    """Writes a pair under temporary names; `finalize` gives both their names, so a pair is whole or absent."""

    def __init__(self, prefix: str | Path, dtype: DTypeLike, vocab_size: int | None = None) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        limits = np.iinfo(self.dtype)
        self._highest = limits.max if vocab_size is None else min(limits.max, vocab_size - 1)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._num_bytes = 0
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        for path in self.prefix.parent.glob(f"{glob.escape(self.prefix.name)}.*.partial"):
            logger.warning("%s was left by an interrupted run and can be removed, unless another is writing it", path)
        # Names of its own, so that two writers of one prefix cannot mix their bytes: the last to finish wins.
        own = uuid.uuid4().hex[:8]
        self._partial_bin = Path(f"{bin_path(prefix)}.{own}.partial")
        self._partial_idx = Path(f"{idx_path(prefix)}.{own}.partial")
        self._file = self._partial_bin.open("wb")

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self.abort()

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // self.dtype.itemsize

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document: its sequences' ids back to back, and the length of each (default: one sequence).

        A document without tokens adds an entry to the document array and no sequence.
        """
        ids = np.asarray(tokens)
        if ids.size and (ids.min() < 0 or ids.max() > self._highest):
            wrong = ids[(ids < 0) | (ids > self._highest)][0]
            raise ValueError(
                f"{bin_path(self.prefix)}: document {self.num_documents} holds token id {wrong}, "
                f"but the vocabulary allows 0 to {self._highest}"
            )
        sizes = [ids.size] if lengths is None else [int(length) for length in lengths]
        sizes = [size for size in sizes if size]
        assert sum(sizes) == ids.size, "the lengths of a document's sequences must add up to its tokens"
        stored = np.ascontiguousarray(ids, dtype=self.dtype)
        if stored.size:
            self._file.write(stored.data)
        self._num_bytes += stored.nbytes
        self._lengths.extend(sizes)
        self._documents.append(len(self._lengths))

    def add_set(self, prefix: str | Path) -> None:
        """Append a whole pair of the same token type: its `.bin` as it is, its arrays moved up."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{bin_path(prefix)}: holds {other.dtype} ids, the set it is merged into {self.dtype}")
        with bin_path(prefix).open("rb") as source:
            shutil.copyfileobj(source, self._file, 16 * 1024 * 1024)
        moved = other.document_indices[1:] + len(self._lengths)
        self._documents.frombytes(moved.astype(np.int64).tobytes())
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._num_bytes += other.index.num_bytes

    def finalize(self) -> None:
        """Complete both files and give them their names."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        write_index(self._partial_idx, self.dtype, lengths, np.frombuffer(self._documents, dtype=np.int64))
        # A reader needs both files: with the old index gone first, no moment shows halves of two sets.
        idx_path(self.prefix).unlink(missing_ok=True)
        self._partial_bin.replace(bin_path(self.prefix))
        self._partial_idx.replace(idx_path(self.prefix))

    def abort(self) -> None:
        """Throw away what was written."""
        self._file.close()
        self._partial_bin.unlink(missing_ok=True)
        self._partial_idx.unlink(missing_ok=True)


def merge_datasets(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Join pairs of one token type in the given order."""
    if not prefixes:
        raise ValueError(f"{output_prefix}: no sets to merge")
    dtype = read_index(idx_path(prefixes[0])).dtype
    with IndexedDatasetWriter(output_prefix, dtype) as writer:
        for prefix in prefixes:
            writer.add_set(prefix)
        writer.finalize()


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file (a data path is a prefix: PREFIX.bin and PREFIX.idx)") from None
