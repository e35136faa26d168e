"""Norm and clipping of flat gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.optimizer.grad_norm import clip_coefficient, scale_gradients, sum_of_squares, total_norm
from tests.grad_reduce.stages import single_channel


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 10_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected = values.double().square().sum().item()
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)


def test_a_large_float32_gradient_keeps_its_precision() -> None:
    # Equal values round alike, the worst case: torch's own float32 norm of this tensor is off by 7e-3.
    values = torch.full((8_000_000,), 0.1)
    assert sum_of_squares(values).item() == pytest.approx(values[0].double().square().item() * 8e6, rel=2e-6)


def test_uncounted_tensors_matter_for_nans_only() -> None:
    ones, poisoned = torch.ones(4), torch.tensor([float("nan")])
    assert total_norm([ones], [torch.ones(100)], single_channel()).total == pytest.approx(2.0)
    assert not total_norm([ones], [poisoned], single_channel()).finite
    assert not total_norm([ones, poisoned], [], single_channel()).finite
    assert total_norm([], [], single_channel()).total == 0.0


def test_clip_coefficient() -> None:
    assert clip_coefficient(2.0, 1.0) == pytest.approx(0.5, rel=1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(100.0, 0.0) == 1.0
    grad = torch.ones(3)
    scale_gradients([grad], 0.25)
    assert grad.tolist() == [0.25] * 3
