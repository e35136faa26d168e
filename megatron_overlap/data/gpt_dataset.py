"""GPT samples: fixed-length cuts out of shuffled documents laid end to end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_overlap.data.gpt_index import GPTIndex, build_gpt_index
from megatron_overlap.data.index_cache import IndexCache
from megatron_overlap.data.sample import Sample, SampleRules, make_sample

ARRAYS = ("document_index", "sample_index", "shuffle_index")


class TokenStore(Protocol):
    """Sequences of token ids: an `IndexedDataset`, or something that makes them up."""

    @property
    def prefix(self) -> str: ...

    @property
    def sequence_lengths(self) -> NDArray[np.int32]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]: ...


@dataclass(frozen=True)
class SampleRequest:
    """Which part of a set is read (`sequences`, of the split `split`), how often, and in which order."""

    split: str
    sequences: range
    num_samples: int | None  # None: one epoch
    sequence_length: int
    seed: int

    def build_index(self, store: TokenStore) -> GPTIndex:
        return build_gpt_index(
            store.sequence_lengths,
            self.sequences,
            sequence_length=self.sequence_length,
            num_samples=self.num_samples,
            seed=self.seed,
        )

    def cache(self, store: TokenStore, directory: Path) -> IndexCache:
        description = {
            **asdict(self),
            "class": "GPTDataset",
            "path": store.prefix,
            "sequences": [self.sequences.start, self.sequences.stop],
            "content": _fingerprint(store.sequence_lengths),
        }
        return IndexCache(directory, f"GPTDataset-{self.split}", description)


class GPTDataset:
    """Sample i of a split; ids at or above `vocab_size` are an error that names the file."""

    def __init__(self, store: TokenStore, index: GPTIndex, rules: SampleRules, vocab_size: int) -> None:
        self.store = store
        self.index = index
        self.rules = rules
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.store.prefix}: sample {index} of {len(self)}")
        text = self.text(index)
        largest = int(text.max())
        if largest >= self.vocab_size:
            raise out_of_vocabulary(self.store.prefix, largest, self.vocab_size)
        return make_sample(text, self.rules)

    def text(self, index: int) -> NDArray[np.int64]:
        """The s + 1 tokens of sample `index`."""
        parts = [self.store.get(*piece) for piece in self.index.pieces(index)]
        text = np.concatenate(parts).astype(np.int64)
        assert len(text) == self.rules.sequence_length + 1, "the sample index does not fit the sequence lengths"
        return text


def store_index(request: SampleRequest, store: TokenStore, directory: Path) -> None:
    """Build the arrays of a request, unless they are in the cache."""
    cache = request.cache(store, directory)
    if not cache.holds(*ARRAYS):
        index = request.build_index(store)
        cache.store(document_index=index.document, sample_index=index.sample, shuffle_index=index.shuffle)


def load_index(request: SampleRequest, store: TokenStore, directory: Path) -> GPTIndex:
    document, sample, shuffle = request.cache(store, directory).load(*ARRAYS)
    return GPTIndex(document, sample, shuffle)


def out_of_vocabulary(prefix: str, largest: int, vocab_size: int) -> ValueError:
    return ValueError(
        f"{prefix}.bin: holds token id {largest}, but the vocabulary has ids 0 to {vocab_size - 1}: "
        "--tokenizer-type, --vocab-size or the tokenizer's files are not those the data was made with"
    )


def _fingerprint(lengths: NDArray[np.int32]) -> list[int]:
    """Tells a set that was written anew under the same name; looks at lengths only, never at the tokens."""
    probes = np.linspace(0, len(lengths) - 1, num=min(len(lengths), 1024), dtype=np.int64)
    weights = np.arange(1, len(probes) + 1)
    return [len(lengths), int(lengths.sum(dtype=np.int64)), int((lengths[probes] * weights).sum(dtype=np.int64))]
