"""Several sets read in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_overlap.data.index_cache import IndexCache
from megatron_overlap.data.sample import Sample, SampleSource

# A member set is built with this much more than its share, since the interleave may run ahead of it.
SURPLUS = 0.005
MAX_MEMBERS = 32767  # member numbers are stored in 16 bits
# Steps of an interleave that are worked out one after the other, and blocks of them side by side.
BLOCK = 1024
MAX_BLOCKS = 4096


@dataclass(frozen=True)
class Blend:
    """Prefixes of a --data-path and their normalised weights (None: as many samples as each set has)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """Read the words of a data flag: prefixes, or pairs of a weight and a prefix."""
    if not values:
        raise ValueError(f"{flag}: no data prefix given")
    if len(values) > 2 * MAX_MEMBERS:
        raise ValueError(f"{flag}: at most {MAX_MEMBERS} sets can be blended")
    firsts = [_number(value) for value in values[::2]]
    if len(values) % 2 == 1 or firsts[0] is None:
        numbers = [value for value in values if _number(value) is not None]
        if numbers and len(values) > 1:
            raise ValueError(f"{flag}: expected prefixes only, or WEIGHT PREFIX pairs, found the number {numbers[0]!r}")
        return Blend(tuple(values), None)
    weights = []
    for weight, word, prefix in zip(firsts, values[::2], values[1::2], strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise ValueError(f"{flag}: the weight of {prefix} must be a number above 0, found {word!r}")
        weights.append(weight)
    return Blend(tuple(values[1::2]), tuple(normalized(weights)))


def normalized(weights: Sequence[float]) -> list[float]:
    scaled = np.asarray(weights, dtype=np.float64)
    return [float(weight) for weight in scaled / np.sum(scaled)]


def blend_size(weights: Sequence[float], num_samples: int) -> int:
    """Length of a weighted blend asked for `num_samples`."""
    return sum(math.ceil(num_samples * weight) for weight in weights)


def member_sizes(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples that each set of a weighted blend is built with."""
    return [math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)) for weight in weights]


@dataclass(frozen=True)
class BlendIndex:
    """members int16 [size]: which set; samples int64 [size]: which sample of it; counts int64: samples per set."""

    members: NDArray[np.int16]
    samples: NDArray[np.int64]
    counts: NDArray[np.int64]


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Deterministic interleave: step k takes from the set with the largest weight * max(k, 1) - taken, first on ties.

    A set is never more than one sample ahead of its share, so proportions hold at every prefix of the run.
    """
    members = _interleave(np.asarray(normalized(weights)), size)
    counts = np.bincount(members, minlength=len(weights)).astype(np.int64)
    # Within each set samples are taken in order: number the steps of a set from 0.
    samples = np.empty(size, dtype=np.int64)
    samples[np.argsort(members, kind="stable")] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return BlendIndex(members, samples, counts)


def _interleave(weights: NDArray[np.float64], size: int) -> NDArray[np.int16]:
    """The set of each step.

    Every step depends on the one before, but the state (samples taken of each set) soon forgets where it began. So
    the steps are cut into blocks that run side by side, each from a guess of its state. A guess that was wrong is
    then put right from its block's start to the step where both states meet, usually within a hundred steps.
    """
    block = max(BLOCK, -(-size // MAX_BLOCKS))
    firsts = np.arange(0, size, block)
    guesses = _rounded_shares(weights, firsts)
    taken = guesses.copy()
    members = np.empty((len(firsts), block), dtype=np.int16)
    for step in range(block):
        picks = np.argmax(weights * np.maximum(firsts + step, 1)[:, None] - taken, axis=1)
        taken[np.arange(len(firsts)), picks] += 1
        members[:, step] = picks
    for number in range(1, len(firsts)):
        state, guess = taken[number - 1].copy(), guesses[number]
        step = 0
        while step < block and not np.array_equal(state, guess):
            pick = np.argmax(weights * float(firsts[number] + step) - state)
            guess[members[number, step]] += 1
            members[number, step] = pick
            state[pick] += 1
            step += 1
        if step == block:
            taken[number] = state
    return members.reshape(-1)[:size]


def _rounded_shares(weights: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers [steps, sets] near weight * step that add up to the step."""
    shares = weights * steps[:, None]
    taken = np.floor(shares).astype(np.int64)
    missing = steps - taken.sum(axis=1)
    places = np.argsort(np.argsort(taken - shares, axis=1, kind="stable"), axis=1)
    return taken + (places < missing[:, None])


@dataclass(frozen=True)
class BlendRequest:
    split: str
    weights: tuple[float, ...]
    size: int

    def cache(self, directory: Path) -> IndexCache:
        description: dict[str, Any] = {"class": "BlendedDataset", "weights": list(self.weights), "size": self.size}
        return IndexCache(directory, f"BlendedDataset-{self.split}", description)


ARRAYS = ("dataset_index", "dataset_sample_index", "dataset_counts")


def store_blend(request: BlendRequest, directory: Path) -> None:
    cache = request.cache(directory)
    if not cache.holds(*ARRAYS):
        index = build_blend_index(request.weights, request.size)
        cache.store(dataset_index=index.members, dataset_sample_index=index.samples, dataset_counts=index.counts)


def load_blend(request: BlendRequest, directory: Path) -> BlendIndex:
    return BlendIndex(*request.cache(directory).load(*ARRAYS))


class BlendedDataset:
    """Sample i comes from one of `datasets`, named in the key `dataset_id`."""

    def __init__(self, datasets: Sequence[SampleSource], index: BlendIndex) -> None:
        self.datasets = list(datasets)
        self.index = index
        for member, (dataset, count) in enumerate(zip(self.datasets, index.counts.tolist(), strict=True)):
            if count > len(dataset):
                raise ValueError(
                    f"the blend takes {count} samples of data set {member}, which was built with {len(dataset)}: "
                    f"raise the surplus of the sets of a blend (now {SURPLUS})"
                )

    def __len__(self) -> int:
        return len(self.index.members)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        member = int(self.index.members[index])
        sample = self.datasets[member][int(self.index.samples[index])]
        return {**sample, "dataset_id": np.asarray(member, dtype=np.int64)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
