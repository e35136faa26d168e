"""Cross entropy over cut logits against torch's in double precision over the true vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from megatron_overlap.tensor_parallel import vocab_parallel_cross_entropy
from tests.comm.opened import lone_channel, open_channel
from tests.ranks import run_ranks

ROWS = 9


@dataclass(frozen=True)
class Case:
    """True and padded vocabulary, the size of the logits, and how near losses and gradients must come."""

    vocab: int
    padded: int
    dtype: torch.dtype = torch.float64
    scale: float = 1.0
    loss_tolerance: float = 1e-12
    grad_tolerance: float = 1e-12


CASES = {
    "whole": Case(24, 24),
    "padding on the last rank": Case(37, 40),
    "ranks of padding only": Case(5, 16),
    "one class": Case(1, 4),
    "fp32": Case(37, 40, torch.float32, 1.0, 1e-6, 1e-6),
    "large fp32 logits": Case(37, 40, torch.float32, 1e4, 1e-2, 1e-5),
    "bf16 logits": Case(37, 40, torch.bfloat16, 1.0, 1e-6, 2**-8),
    "bf16 and ranks of padding only": Case(5, 16, torch.bfloat16, 1.0, 1e-6, 2**-8),
}


def make_operands(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with rubbish where the padding is, labels (the first and last class among them), output gradient."""
    generator = torch.Generator().manual_seed(4)
    logits = (case.scale * torch.randn(ROWS, case.padded, generator=generator, dtype=torch.float64)).to(case.dtype)
    logits[:, case.vocab :] = float("nan")
    logits[0, case.vocab :] = 1e30
    labels = torch.randint(case.vocab, (ROWS,), generator=generator)
    labels[0], labels[1] = 0, case.vocab - 1
    return logits, labels, torch.randn(ROWS, generator=generator, dtype=torch.float64)


def check_loss(case: Case) -> torch.Tensor:
    channel = open_channel()
    logits, labels, grad_output = make_operands(case)
    oracle = logits[:, : case.vocab].double().requires_grad_()
    expected = functional.cross_entropy(oracle, labels, reduction="none")
    expected.backward(grad_output)
    assert oracle.grad is not None
    expected_grad = torch.cat([oracle.grad, torch.zeros(ROWS, case.padded - case.vocab)], dim=1)
    own = logits.chunk(channel.size, dim=1)[channel.rank].contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(own, labels, channel, case.vocab)
    assert losses.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=case.loss_tolerance)
    losses.backward(grad_output.to(losses.dtype))
    assert own.grad is not None
    assert own.grad.dtype == case.dtype
    own_grad = expected_grad.chunk(channel.size, dim=1)[channel.rank]
    torch.testing.assert_close(own.grad.double(), own_grad, rtol=0, atol=case.grad_tolerance)
    return losses.detach()


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_torch_over_the_true_vocabulary(world: int, case: Case) -> None:
    losses = run_ranks(world, check_loss, (case,), shim="late+freeze")
    # All ranks hold the same bits: they must go the same way where something depends on the loss.
    assert all(torch.equal(losses[0], other) for other in losses)


def test_the_initial_loss_counts_true_classes_only() -> None:
    losses = vocab_parallel_cross_entropy(torch.zeros(2, 136), torch.tensor([3, 130]), lone_channel(), 131)
    torch.testing.assert_close(losses, torch.full((2,), math.log(131)))


def test_labels_out_of_range_spoil_no_other_row() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([2, -100, 5])
    losses = vocab_parallel_cross_entropy(logits.clone(), labels, lone_channel(), 8)
    expected = functional.cross_entropy(logits[::2], labels[::2], reduction="none")
    torch.testing.assert_close(losses[::2], expected)
    assert losses[1].isfinite()
