"""GPT samples: which tokens, in which order, and what is made of them, against a slow oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_overlap.data.gpt_dataset import GPTDataset
from megatron_overlap.data.gpt_index import build_gpt_index, build_sample_index, plan_epochs
from megatron_overlap.data.mock import MockTokens
from megatron_overlap.data.sample import NO_ID, SampleRules, make_sample
from tests.data import oracle


class ListedTokens:
    """Sequences held in memory."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.prefix = "listed"
        self.sequences = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        self.sequence_lengths = np.asarray([len(sequence) for sequence in sequences], dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        return self.sequences[index][offset : None if length is None else offset + length]


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences in which every token is another number."""
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)]


def texts(store: ListedTokens, sequences: range, length: int, wanted: int | None, seed: int) -> list[list[int]]:
    index = build_gpt_index(store.sequence_lengths, sequences, sequence_length=length, num_samples=wanted, seed=seed)
    dataset = GPTDataset(store, index, SampleRules(length), vocab_size=1 << 30)
    return [dataset.text(number).tolist() for number in range(len(dataset))]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    length=st.integers(1, 9),
    wanted=st.none() | st.integers(1, 60),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_samples_are_those_of_the_oracle(
    lengths: list[int], length: int, wanted: int | None, seed: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(begin + 1, len(lengths)))
    documents = numbered(lengths)
    expected = oracle.gpt_texts(documents[begin:end], length, wanted, seed)
    assert texts(ListedTokens(documents), range(begin, end), length, wanted, seed) == expected
    assert wanted is None or len(expected) >= wanted


@pytest.mark.parametrize(
    ("wanted", "epochs", "separate"),
    [(None, 1, False), (24, 1, False), (25, 2, True), (42, 2, True), (43, 2, False), (49, 2, False), (50, 3, True)],
)
def test_a_last_epoch_used_to_less_than_four_fifths_is_shuffled_apart(
    wanted: int | None, epochs: int, separate: bool
) -> None:
    # 100 tokens and length 4: 24 samples an epoch, so the border lies at int(0.8 * 24) = 19 samples of the last.
    plan = plan_epochs(100, 4, wanted)
    assert (plan.num_epochs, plan.separate_final_epoch) == (epochs, separate)
    documents = numbered([7] * 10 + [30])
    assert texts(ListedTokens(documents), range(11), 4, wanted, 1234) == oracle.gpt_texts(documents, 4, wanted, 1234)


def test_an_order_written_down_once() -> None:
    # Computed by megatron-core 0.16.1. It must never change: it decides what a resumed run reads.
    index = build_gpt_index(
        np.asarray([3, 5, 2, 4], dtype=np.int32), range(4), sequence_length=4, num_samples=8, seed=1234
    )
    assert index.document.tolist() == [3, 0, 3, 2, 1, 2, 1, 0, 0, 1, 2, 3]
    assert index.sample.tolist()[:4] == [[0, 0], [1, 0], [2, 1], [3, 1]]
    assert index.shuffle.tolist() == [3, 9, 2, 1, 7, 5, 4, 0, 8, 6]
    assert (index.document.dtype, index.sample.dtype, index.shuffle.dtype) == (np.int32, np.int32, np.uint32)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12), length=st.integers(1, 4))
def test_sequences_without_tokens_are_stepped_over(lengths: list[int], length: int) -> None:
    total = sum(lengths)
    num_samples = max(0, (total - 1) // length)
    if num_samples == 0:
        return
    document = np.arange(len(lengths), dtype=np.int32)
    sample = build_sample_index(np.asarray(lengths, dtype=np.int32), document, length, num_samples)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    assert [int(starts[position]) + offset for position, offset in sample.tolist()] == [
        number * length for number in range(num_samples + 1)
    ]
    assert all(offset < lengths[position] for position, offset in sample.tolist())


def test_a_large_set_is_indexed_without_a_loop_over_samples() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=1_500_000, dtype=np.int32)  # more than one block
    document = np.arange(len(lengths), dtype=np.int32)
    num_samples = (int(lengths.sum()) - 1) // 16
    sample = build_sample_index(lengths, document, 16, num_samples)  # a loop would take a minute
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    assert np.array_equal(starts[sample[:, 0]] + sample[:, 1], np.arange(num_samples + 1) * 16)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.lists(st.integers(0, 4), min_size=2, max_size=9),
    pad=st.sampled_from([NO_ID, 3]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_sample_contents(text: list[int], pad: int, flags: tuple[bool, bool, bool]) -> None:
    rules = SampleRules(len(text) - 1, eod=4, pad=pad, **dict(zip(FLAGS, flags, strict=True)))
    sample = make_sample(np.asarray(text, dtype=np.uint16), rules)
    expected = oracle.sample(text, 4, pad, flags)
    assert {key: value.tolist() for key, value in sample.items()} == expected
    types = {key: value.dtype for key, value in sample.items()}
    assert types.pop("loss_mask") == np.float32
    assert types.pop("attention_mask", np.dtype(bool)) == np.dtype(bool)
    assert set(types.values()) == {np.dtype(np.int64)}


FLAGS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def test_ids_outside_the_vocabulary_are_named_when_read() -> None:
    store = ListedTokens([[1, 2, 130, 3]])
    index = build_gpt_index(store.sequence_lengths, range(1), sequence_length=3, num_samples=None, seed=1)
    with pytest.raises(ValueError, match=r"listed.bin: holds token id 130, but the vocabulary has ids 0 to 127"):
        GPTDataset(store, index, SampleRules(3), vocab_size=128)[0]
    with pytest.raises(IndexError, match="sample 1 of 1"):
        GPTDataset(store, index, SampleRules(3), vocab_size=131)[1]


def test_mock_documents_count_upwards_and_end() -> None:
    mock = MockTokens(vocab_size=10, eod=9)
    assert mock.sequence_lengths[:3].tolist() == np.random.default_rng(0).integers(1, 4096, 3).tolist()
    length = int(mock.sequence_lengths[0])
    whole = [(number + 1) % 10 for number in range(length - 1)] + [9]
    assert mock.get(0).tolist() == whole
    assert mock.get(0, 5, 7).tolist() == whole[5:12]
    assert mock.get(0, length - 3).tolist() == whole[-3:]
