"""Which sequences of which sets are for training, validation and test."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_overlap.config import DataConfig
from megatron_overlap.config.resolve import DEFAULT_SPLIT
from megatron_overlap.config.rules import SHARE
from megatron_overlap.data.blend import Blend, normalized, parse_blend
from megatron_overlap.data.gpt_dataset import TokenStore
from megatron_overlap.data.indexed_dataset import IndexedDataset
from megatron_overlap.data.mock import MockTokens

logger = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")
WHOLE = (0.0, 1.0)

Share = tuple[float, float]


@dataclass(frozen=True)
class Member:
    """The part of one set that a split reads."""

    store: TokenStore
    sequences: range

    @property
    def num_tokens(self) -> int:
        lengths = self.store.sequence_lengths[self.sequences.start : self.sequences.stop]
        return int(lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class SplitSource:
    """Where a split comes from; weights are normalised, or None: each set as often as it has samples."""

    split: str
    members: tuple[Member, ...]
    weights: tuple[float, ...] | None


def parse_split(text: str) -> list[Share | None]:
    """Begin and end of each split as shares of the whole; None where a split has no share."""
    numbers = [float(number) for number in re.findall(SHARE, text)]
    if not 1 <= len(numbers) <= len(SPLITS) or sum(numbers) <= 0:
        raise ValueError(
            f'--split "{text}": expected one to three shares that are not all 0, such as "{DEFAULT_SPLIT}"'
        )
    borders = [0.0]
    for share in normalized(numbers + [0.0] * (len(SPLITS) - len(numbers))):
        borders.append(borders[-1] + share)
    return [(low, high) if high > low else None for low, high in pairwise(borders)]


def split_sources(
    data: DataConfig, mock: MockTokens | None, *, num_samples: Sequence[int], sequence_length: int, warn: bool
) -> list[SplitSource]:
    """The splits that samples are wanted of and that hold tokens; only training must be among them."""
    blends, shares = _blends_and_shares(data, mock)
    stores: dict[str, TokenStore] = {} if mock is None else {mock.prefix: mock}
    sources = []
    for split, blend, share, wanted in zip(SPLITS, blends, shares, num_samples, strict=True):
        if wanted == 0:
            continue
        source = None
        if blend is not None and share is not None:
            for prefix in blend.prefixes:
                if prefix not in stores:
                    stores[prefix] = IndexedDataset(prefix)
            members = [_member(stores[prefix], share) for prefix in blend.prefixes]
            source = _without_empty(split, members, blend.weights, sequence_length, warn)
        if source is not None:
            sources.append(source)
        elif split == "train":
            raise ValueError("there is nothing to train on: --split, --data-path or --train-data-path leave no tokens")
    return sources


def _blends_and_shares(data: DataConfig, mock: MockTokens | None) -> tuple[list[Blend | None], list[Share | None]]:
    if mock is not None:
        return [Blend((mock.prefix,), None)] * 3, parse_split(MockTokens.SPLIT)
    if data.data_path:
        return [parse_blend(data.data_path, "--data-path")] * 3, parse_split(data.split or DEFAULT_SPLIT)
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [
        parse_blend(path, f"--{split}-data-path") if path else None for split, path in zip(SPLITS, paths, strict=True)
    ]
    return blends, [WHOLE] * 3


def _member(store: TokenStore, share: Share) -> Member:
    low, high = (round(border * len(store.sequence_lengths)) for border in share)
    return Member(store, range(low, high))


def _without_empty(
    split: str, members: Sequence[Member], weights: Sequence[float] | None, sequence_length: int, warn: bool
) -> SplitSource | None:
    """Leave out parts that give no sample; a set read in several epochs needs one token, one read once a sample."""
    enough = sequence_length + 1 if weights is None and len(members) > 1 else 1
    kept = []
    for number, member in enumerate(members):
        if member.num_tokens >= enough:
            kept.append(number)
        elif warn:
            logger.warning(
                "%s: left out of the %s split, for which it has %d sequences with %d tokens",
                member.store.prefix,
                split,
                len(member.sequences),
                member.num_tokens,
            )
    if not kept:
        return None
    kept_weights = None if weights is None else tuple(normalized([weights[number] for number in kept]))
    return SplitSource(split, tuple(members[number] for number in kept), kept_weights)
