"""Slow second versions of the documented orders, one token at a time; they share nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def gpt_texts(documents: Sequence[Sequence[int]], length: int, wanted: int | None, seed: int) -> list[list[int]]:
    """Texts (length + 1 ids) of a split that holds `documents`, in the order in which they are read."""
    tokens = sum(len(document) for document in documents)
    epochs = 1
    while wanted is not None and epochs * tokens < wanted * length + 1:
        epochs += 1
    separate, before_last = False, 0
    if epochs > 1:
        assert wanted is not None
        before_last = ((epochs - 1) * tokens - 1) // length
        separate = wanted - before_last < int(0.80 * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    first = list(range(len(documents))) * (epochs - 1 if separate else epochs)
    order = shuffled(first, random)
    if separate:
        order += shuffled(list(range(len(documents))), random)

    stream = [token for document in order for token in documents[document]]
    texts, start = [], 0
    while start + length + 1 <= len(stream):
        texts.append(stream[start : start + length + 1])
        start += length
    together = before_last if separate else len(texts)
    numbers = shuffled(list(range(together)), random)
    if separate:
        numbers += shuffled(list(range(together, len(texts))), random)
    return [texts[number] for number in numbers]


def shuffled(values: list[int], random: np.random.RandomState) -> list[int]:
    array = np.array(values, dtype=np.int64)
    random.shuffle(array)
    return array.tolist()


def blend(weights: Sequence[float], size: int) -> list[tuple[int, int]]:
    """(set, sample of it) for every sample of a blend."""
    total = float(np.sum(np.array(weights, dtype=np.float64)))
    scaled = [weight / total for weight in weights]
    used = [0] * len(weights)
    result = []
    for k in range(size):
        best = 0
        for i in range(1, len(weights)):
            if scaled[i] * max(k, 1) - used[i] > scaled[best] * max(k, 1) - used[best]:
                best = i
        result.append((best, used[best]))
        used[best] += 1
    return result


def blend_sizes(weights: Sequence[float], wanted: int) -> tuple[list[int], int]:
    """Samples that each set is built with, and the length of the blend."""
    shares = [math.ceil(wanted * weight / sum(weights)) for weight in weights]
    return [math.ceil(share * 1.005) for share in shares], sum(shares)


def sample(text: Sequence[int], eod: int, pad: int, flags: Sequence[bool]) -> dict[str, list]:
    """What a text gives, with flags (eod_mask_loss, reset_position_ids, reset_attention_mask)."""
    mask_loss, reset_positions, reset_mask = flags
    inputs, labels = list(text[:-1]), list(text[1:])
    length = len(inputs)
    loss_mask = [1.0] * length
    for place in range(length):
        if labels[place] == pad or (mask_loss and inputs[place] == eod):
            loss_mask[place] = 0.0
    positions, since = [], 0
    for token in inputs:
        positions.append(since)
        since = 0 if reset_positions and token == eod else since + 1
    result: dict[str, list] = {"loss_mask": loss_mask, "position_ids": positions}
    if reset_mask:
        result["attention_mask"] = [
            [[column > row or eod in inputs[column:row] for column in range(length)] for row in range(length)]
        ]
    result["tokens"] = [0 if token == pad else token for token in inputs]
    result["labels"] = [0 if label == pad else label for label in labels]
    return result
