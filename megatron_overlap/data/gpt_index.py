"""Which tokens sample i of a GPT set is made of: three index arrays, a function of seed, lengths and sample count.

The permutations are Megatron's, so a run that moves over goes on with the data it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A last epoch of which less than this share is used is shuffled apart from the epochs before it.
SEPARATE_BELOW = 0.80
# From this many samples on the shuffle index is stored in 64 bits.
SHUFFLE_UINT32_LIMIT = 2**32 - 2


@dataclass(frozen=True)
class GPTIndex:
    """document [E * D] sequence ids; sample [n + 1, 2] (position in document, token offset); shuffle [n]."""

    document: NDArray[np.int32]
    sample: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]

    def __len__(self) -> int:
        return len(self.shuffle)

    def pieces(self, sample: int) -> Iterator[tuple[int, int, int | None]]:
        """(sequence id, first token, number of tokens or None for the rest) that make up shuffled sample `sample`."""
        row = int(self.shuffle[sample])
        (first, offset), (last, end) = self.sample[row].tolist(), self.sample[row + 1].tolist()
        for position in range(first, last + 1):
            begin = offset if position == first else 0
            # The next sample begins on the last token of this one, hence the one more.
            yield int(self.document[position]), begin, end + 1 - begin if position == last else None


@dataclass(frozen=True)
class EpochPlan:
    """How often the tokens are passed over to get `num_samples`, and how many samples are shuffled together."""

    num_epochs: int
    separate_final_epoch: bool
    num_samples: int  # in all epochs, at least what was asked for
    num_first_samples: int  # shuffled among themselves; the rest is shuffled apart


def plan_epochs(tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> EpochPlan:
    """Epochs for `num_samples` samples (None: one epoch) that overlap by one token."""
    assert tokens_per_epoch > 0, "an empty split has no samples"
    num_epochs = 1
    if num_samples is not None:
        num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // sequence_length
    if num_epochs == 1 or num_samples is None:
        return EpochPlan(num_epochs, False, total, total)
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
    per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = num_samples - before_last < int(SEPARATE_BELOW * per_epoch)
    return EpochPlan(num_epochs, separate, total, before_last if separate else total)


def build_gpt_index(
    lengths: NDArray[np.int32],
    sequences: range,
    *,
    sequence_length: int,
    num_samples: int | None,
    seed: int,
) -> GPTIndex:
    """The three arrays for the run of `sequences`; `lengths` holds the tokens of every sequence of the set.

    One generator serves both shuffles, documents first: the order is part of what is reproduced.
    """
    tokens_per_epoch = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, sequence_length, num_samples)
    random = np.random.RandomState(seed)
    document = _document_index(sequences, plan, random)
    sample = build_sample_index(lengths, document, sequence_length, plan.num_samples)
    return GPTIndex(document, sample, _shuffle_index(plan, random))


def build_sample_index(
    lengths: NDArray[np.int32], document: NDArray[np.int32], sequence_length: int, num_samples: int
) -> NDArray[np.int32 | np.int64]:
    """Where each sample starts, as (position in `document`, token offset in that sequence), and one row for the end.

    Sample k starts at token k * sequence_length of the sequences laid end to end. So a sequence that ends at token
    e (exclusive) has ceil(e / sequence_length) starts up to its end, and differences of that count them.
    """
    largest = max(len(document), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    sample = np.empty((num_samples + 1, 2), dtype=dtype)
    done, tokens = 0, 0
    # In blocks, so that what is needed besides the result stays small for sets of 1e8 sequences.
    block = 1 << 20
    for begin in range(0, len(document), block):
        ends = tokens + np.cumsum(lengths[document[begin : begin + block]], dtype=np.int64)
        starts_so_far = np.minimum(-(-ends // sequence_length), num_samples + 1)
        counts = np.diff(starts_so_far, prepend=done)
        local = np.repeat(np.arange(len(ends)), counts)
        upto = int(starts_so_far[-1])
        begins = np.concatenate(([tokens], ends[:-1]))
        sample[done:upto, 0] = local + begin
        sample[done:upto, 1] = np.arange(done, upto, dtype=np.int64) * sequence_length - begins[local]
        done, tokens = upto, int(ends[-1])
    assert done == num_samples + 1, f"{tokens} tokens do not hold {num_samples} samples of {sequence_length}"
    return sample


def _document_index(sequences: range, plan: EpochPlan, random: np.random.RandomState) -> NDArray[np.int32]:
    ids = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    together = plan.num_epochs - 1 if plan.separate_final_epoch else plan.num_epochs
    document = np.tile(ids, plan.num_epochs)
    first, last = np.split(document, [together * len(ids)])
    random.shuffle(first)
    if plan.separate_final_epoch:
        random.shuffle(last)
    return document


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray[np.uint32 | np.int64]:
    shuffle: NDArray[np.uint32 | np.int64]
    shuffle = np.arange(plan.num_samples, dtype=np.uint32 if plan.num_samples < SHUFFLE_UINT32_LIMIT else np.int64)
    first, last = np.split(shuffle, [plan.num_first_samples])
    random.shuffle(first)
    if len(last):
        random.shuffle(last)
    return shuffle
