"""Made-up documents that count upwards, for trying a run without data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class MockTokens:
    """100000 documents 1, 2, 3, ... (modulo the vocabulary) of random lengths, each closed by an end token."""

    NUM_DOCUMENTS = 100_000
    LENGTH_LIMIT = 4096
    SPLIT = "1,1,1"

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.prefix = "--mock-data"
        self._vocab_size = vocab_size
        self._eod = eod
        random = np.random.default_rng(seed=0)
        self._lengths = random.integers(1, self.LENGTH_LIMIT, size=self.NUM_DOCUMENTS, dtype=np.int32)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return self._lengths

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        stop = int(self._lengths[index])
        end = stop if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self._vocab_size
        if end == stop and len(tokens):
            tokens[-1] = self._eod
        return tokens
