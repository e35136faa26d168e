"""Embeddings cut over ranks against `functional.embedding` in one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron_overlap.comm import Ledger
from megatron_overlap.tensor_parallel import LayerContext, VocabParallelEmbedding
from megatron_overlap.tensor_parallel.embedding import embed
from megatron_overlap.tensor_parallel.layers import fill_zero
from tests.comm.opened import open_channel
from tests.ranks import run_ranks

VOCAB, PADDED, WIDTH, NUM_IDS = 37, 40, 6, 64


def make_operands(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (many of them more than once), table and output gradient."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (NUM_IDS,), generator=generator)
    table = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
    return ids, table, torch.randn(NUM_IDS, WIDTH, generator=generator, dtype=torch.float64)


def table_gradient(ids: torch.Tensor, table: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
    leaf = table.clone().requires_grad_()
    functional.embedding(ids, leaf).backward(grad_output)
    assert leaf.grad is not None
    return leaf.grad


def check_vocabulary(sequence_parallel: bool, with_main_grad: bool) -> None:
    ledger = Ledger()
    channel = open_channel(ledger=ledger)
    size, rank = channel.size, channel.rank
    ids, table, grad_output = make_operands()
    context = LayerContext(channel, sequence_parallel, torch.float64)
    layer = VocabParallelEmbedding(PADDED, VOCAB, WIDTH, context, fill=fill_zero)
    with torch.no_grad():
        layer.weight.copy_(table.chunk(size)[rank])
    signals: list[int] = []
    if with_main_grad:
        layer.weight.main_grad = torch.ones_like(layer.weight)
        layer.weight.grad_ready = lambda: signals.append(1)
    output = layer(ids)
    own_rows = slice(rank * NUM_IDS // size, (rank + 1) * NUM_IDS // size) if sequence_parallel else slice(None)
    assert torch.equal(output, table[ids][own_rows])
    output.backward(grad_output[own_rows])
    ledger.assert_empty()
    expected = table_gradient(ids, table, grad_output).chunk(size)[rank]
    if with_main_grad:
        assert layer.weight.grad is None
        assert signals == [1]
        torch.testing.assert_close(layer.weight.main_grad, expected + 1, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_vocabulary_cut_over_ranks(world: int, sequence_parallel: bool, with_main_grad: bool) -> None:
    run_ranks(world, check_vocabulary, (sequence_parallel, with_main_grad), shim="late+freeze")


@pytest.mark.parametrize("with_main_grad", [False, True])
def test_whole_table(with_main_grad: bool) -> None:
    ids, table, grad_output = make_operands()
    weight = torch.nn.Parameter(table.clone())
    if with_main_grad:
        weight.main_grad = torch.ones_like(table)
    output = embed(ids, weight)
    assert torch.equal(output, table[ids])
    output.backward(grad_output)
    expected = table_gradient(ids, table, grad_output)
    if with_main_grad:
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, expected + 1, rtol=0, atol=1e-12)
    else:
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-12)
