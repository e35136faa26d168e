from __future__ import annotations

import itertools

import pytest
import torch

from megatron_overlap.tensor_parallel.dropout import Site, add_dropped, drop_probabilities
from megatron_overlap.tensor_parallel.random import keep_mask, token_keys

KEYS = token_keys(7, torch.arange(3), 4)
SITE = Site.MLP_OUTPUT.of_layer(2)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("with_residual", [False, True])
def test_forward_and_backward_use_one_mask(with_residual: bool) -> None:
    x = randn(12, 10, seed=1).requires_grad_()
    residual = randn(12, 10, seed=2).requires_grad_() if with_residual else None
    grad_output = randn(12, 10, seed=3)
    factor = keep_mask(KEYS, SITE, 10, 0.25).double() / 0.75
    output = add_dropped(x, residual, KEYS, SITE, 0.25)
    torch.testing.assert_close(output, x * factor + (0 if residual is None else residual), rtol=1e-15, atol=1e-15)
    output.backward(grad_output)
    torch.testing.assert_close(x.grad, grad_output * factor, rtol=1e-15, atol=1e-15)
    if residual is not None:
        assert torch.equal(residual.grad, grad_output)


def test_masks_differ_between_sites_and_layers() -> None:
    sites = [site.of_layer(layer) for layer, site in itertools.product(range(5), Site)]
    assert len(set(sites)) == len(sites)
    ones = torch.ones(12, 40)
    outputs = [add_dropped(ones, None, KEYS, site, 0.5) for site in sites]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outputs, 2))


def test_probabilities_keep_their_dtype() -> None:
    probabilities = torch.rand(2, 3, 4, 4).bfloat16().requires_grad_()
    keep = torch.rand(2, 3, 4, 4) > 0.5
    output = drop_probabilities(probabilities, keep, 0.5)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, torch.where(keep, 2 * probabilities, 0))
    output.sum().backward()
    assert torch.equal(probabilities.grad, torch.where(keep, 2.0, 0.0).bfloat16())
