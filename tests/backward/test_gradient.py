"""Weight gradients for autograd, or straight into the main gradient with a signal after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_overlap.backward.gradient import (
    add_indexed_gradient,
    add_row_sum_gradient,
    add_weight_gradient,
    signal_ready,
)

ROWS, IN_SIZE, OUT_SIZE = 5, 3, 4


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GRAD_OUTPUT, INPUT, IDS = randn(ROWS, OUT_SIZE, seed=1), randn(ROWS, IN_SIZE, seed=2), torch.tensor([2, 0, 2, 2, 5])
INDEXED = torch.zeros(6, OUT_SIZE, dtype=torch.float64)
for _id, _row in zip(IDS.tolist(), GRAD_OUTPUT, strict=True):
    INDEXED[_id] += _row

# For each kind: how a gradient is formed in a dtype, and what it must be.
KINDS: dict[str, tuple[Callable[[nn.Parameter, torch.dtype], torch.Tensor | None], torch.Tensor]] = {
    "weight": (
        lambda param, dtype: add_weight_gradient(param, GRAD_OUTPUT.to(dtype), INPUT.to(dtype)),
        torch.einsum("no,ni->oi", GRAD_OUTPUT, INPUT),
    ),
    "bias": (lambda param, dtype: add_row_sum_gradient(param, GRAD_OUTPUT.to(dtype)), GRAD_OUTPUT.sum(0)),
    "table": (lambda param, dtype: add_indexed_gradient(param, IDS, GRAD_OUTPUT.to(dtype)), INDEXED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_main_gradient_the_gradient_is_autograds(kind: str) -> None:
    form, expected = KINDS[kind]
    param = nn.Parameter(torch.zeros_like(expected))
    param.grad_ready = lambda: pytest.fail("autograd has not added it yet")
    gradient = form(param, torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert param.grad is None


@pytest.mark.parametrize(
    ("dtype", "main_dtype", "tolerance"),
    [(torch.float64, torch.float64, 1e-12), (torch.float32, torch.float32, 1e-5), (torch.bfloat16, torch.float32, 0.1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_contributions_add_up_in_the_main_gradient(
    kind: str, dtype: torch.dtype, main_dtype: torch.dtype, tolerance: float
) -> None:
    form, expected = KINDS[kind]
    param = nn.Parameter(torch.zeros(expected.shape, dtype=dtype))
    buffer = torch.full((expected.numel() + 2,), 7.0, dtype=main_dtype)
    param.main_grad = buffer[1:-1].view(expected.shape)
    at_signal: list[torch.Tensor] = []
    param.grad_ready = lambda: at_signal.append(param.main_grad.clone())
    for times in (1, 2):
        assert form(param, dtype) is None
        assert len(at_signal) == times
        torch.testing.assert_close(at_signal[-1].double(), 7 + times * expected, rtol=0, atol=tolerance)
    assert buffer[0] == buffer[-1] == 7


def test_no_reducer_no_signal() -> None:
    signal_ready(nn.Parameter(torch.zeros(2)))
