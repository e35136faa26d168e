from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch

from megatron_overlap.checkpoint.json_state import from_json, to_json


def through_text(value):
    return from_json(json.loads(json.dumps(to_json(value))))


def test_plain_values_come_back_exactly():
    value = {"iteration": 3, "lr": 0.1 + 0.2, "none": None, "on": True, "nested": {"list": [1, [2.5, "x"], {}]}}
    assert through_text(value) == value
    assert math.isnan(through_text(math.nan))
    assert through_text(-math.inf) == -math.inf


def test_random_states_continue_where_they_were():
    generator, legacy, torch_generator = random.Random(5), np.random.RandomState(6), torch.Generator().manual_seed(7)
    numpy_generator = np.random.default_rng(8)
    saved = {
        "python": generator.getstate(),
        "numpy": legacy.get_state(),
        "numpy_generator": numpy_generator.bit_generator.state,
        "torch": torch_generator.get_state(),
    }
    expected = (generator.random(), legacy.rand(), numpy_generator.random(), torch.rand(2, generator=torch_generator))
    loaded = through_text(saved)
    generator.setstate(loaded["python"])
    legacy.set_state(loaded["numpy"])
    numpy_generator.bit_generator.state = loaded["numpy_generator"]
    torch_generator.set_state(loaded["torch"])
    assert (generator.random(), legacy.rand(), numpy_generator.random()) == expected[:3]
    assert torch.equal(torch.rand(2, generator=torch_generator), expected[3])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5, dtype=torch.uint8),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.empty(0, 4),
        torch.randn(4, 3).t(),
    ],
)
def test_tensors_keep_bits_dtype_and_shape(tensor):
    loaded = through_text({"t": tensor})["t"]
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded, tensor)


def test_numpy_arrays_and_scalars():
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    loaded = through_text((array, np.float64(0.5), np.int64(7)))
    assert loaded[0].dtype == array.dtype
    assert (loaded[0] == array).all()
    assert loaded[1:] == (0.5, 7)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"__kind__": 1}, np.array([object()]), {1, 2}])
def test_other_things_are_refused(value):
    with pytest.raises(TypeError):
        to_json(value)
