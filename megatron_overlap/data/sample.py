"""From s + 1 tokens to what a model is fed: tokens, labels, loss mask, positions, attention mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, NDArray[Any]]
NO_ID = -1  # for a token that the tokenizer does not have: no stored id equals it


class SampleSource(Protocol):
    """A dataset: `len` samples, each a dict of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True)
class SampleRules:
    """Sequence length, the ids with a meaning, and what an end-of-document token changes."""

    sequence_length: int
    eod: int = NO_ID
    pad: int = NO_ID
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


def make_sample(text: NDArray[Any], rules: SampleRules) -> Sample:
    """Cut `text` [s + 1] into a sample: int64 [s] tokens, labels, position_ids; float32 [s] loss_mask.

    `attention_mask` (bool [1, s, s], True where hidden) is there only with `reset_attention_mask`; without it
    attention is plainly causal.
    """
    text = np.asarray(text, dtype=np.int64)
    tokens, labels = text[:-1].copy(), text[1:].copy()
    ends = tokens == rules.eod
    loss_mask = np.ones(len(tokens), dtype=np.float32)
    if rules.eod_mask_loss:
        loss_mask[ends] = 0.0
    loss_mask[labels == rules.pad] = 0.0
    positions = np.arange(len(tokens), dtype=np.int64)
    starts = _document_starts(ends)
    position_ids = positions - starts if rules.reset_position_ids else positions
    tokens[tokens == rules.pad] = 0
    labels[labels == rules.pad] = 0
    sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    if rules.reset_attention_mask:
        ahead = positions[None, :] > positions[:, None]
        other_document = starts[None, :] != starts[:, None]
        sample["attention_mask"] = (ahead | other_document)[None]
    return sample


def _document_starts(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each position, where its document starts: the position after the last end token before it, or 0."""
    starts = np.zeros(len(ends), dtype=np.int64)
    starts[1:] = np.where(ends[:-1], np.arange(1, len(ends)), 0)
    return np.maximum.accumulate(starts)
