"""Rotary embedding against multiplication by complex numbers on the unit circle."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.model.attention import make_rotary
from megatron_overlap.model.rotary import Rotary
from tests.model.stages import model_config

BATCH, LENGTH, HEADS, HEAD_SIZE = 2, 9, 3, 8


def rotate_as_complex(rotary: Rotary, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    size = rotary.dimensions
    turned = x[..., :size]
    if rotary.interleaved:
        pairs = torch.complex(turned[..., 0::2], turned[..., 1::2])
    else:
        pairs = torch.complex(turned[..., : size // 2], turned[..., size // 2 :])
    frequency = torch.tensor([rotary.base ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    angle = positions[:, :, None, None].double() / rotary.interpolation * frequency
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    result = x.clone()
    if rotary.interleaved:
        result[..., 0:size:2], result[..., 1:size:2] = pairs.real, pairs.imag
    else:
        result[..., : size // 2], result[..., size // 2 : size] = pairs.real, pairs.imag
    return result


@pytest.mark.parametrize("interpolation", [1.0, 4.0])
@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("dimensions", [8, 4, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_complex_rotation(interleaved: bool, dimensions: int, base: float, interpolation: float) -> None:
    rotary = Rotary(dimensions, base, interleaved, interpolation)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    # The second sample starts anew in the middle, as with --reset-position-ids.
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) % 5])
    rotated = rotary.rotate(x, *rotary.tables(positions, torch.float64))
    torch.testing.assert_close(rotated, rotate_as_complex(rotary, x, positions), rtol=0, atol=1e-13)


def test_tables_are_rounded_once() -> None:
    rotary = Rotary(8, 10000.0, interleaved=False)
    positions = torch.arange(4000, 4100)[None]
    for narrow, wide in zip(
        rotary.tables(positions, torch.bfloat16), rotary.tables(positions, torch.float64), strict=True
    ):
        # Half a unit in the last place of bf16 near one.
        torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=2.1e-3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"position_embedding_type": "learned_absolute"}, None),
        ({"position_embedding_type": "none"}, None),
        ({"position_embedding_type": "rope"}, Rotary(6, 10000.0, interleaved=False)),
        (
            {
                "position_embedding_type": "rope",
                "kv_channels": 16,
                "rotary_percent": 0.25,
                "rotary_base": 5e5,
                "rotary_interleaved": True,
                "rotary_seq_len_interpolation_factor": 2.0,
            },
            Rotary(4, 5e5, interleaved=True, interpolation=2.0),
        ),
    ],
)
def test_flags(changes: dict[str, object], expected: Rotary | None) -> None:
    assert make_rotary(model_config(**changes)) == expected
