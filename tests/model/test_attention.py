"""Self-attention against loops over samples, heads and documents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_overlap.model.attention import SelfAttention
from megatron_overlap.model.gpt import GPTStage
from megatron_overlap.model.inputs import InputMaker, Inputs
from megatron_overlap.tensor_parallel import LayerContext, name_parameters
from tests.comm.opened import lone_channel
from tests.model.stages import SEQUENCE_LENGTH, document_mask, make_batch, make_stage, model_config

HIDDEN = 16
LAYER = 1


def make_attention(**changes: Any) -> tuple[SelfAttention, InputMaker]:
    """A layer with random weights and biases, in double precision, and what makes its inputs."""
    config = model_config(**changes)
    channel = lone_channel()
    attention = SelfAttention(config, LAYER, 1, LayerContext(channel, dtype=torch.float64))
    name_parameters(attention, tp_size=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in attention.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 2)
    return attention, InputMaker(channel, False, attention.rotary, torch.float64, seed=3)


def make_rows(batch_size: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch_size * SEQUENCE_LENGTH, HIDDEN, generator=generator, dtype=torch.float64)


def attend_in_loops(attention: SelfAttention, rows: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """One sample, head and query after the other; weights are read by their documented order."""
    size, per_group = attention.head_size, attention.heads_per_group
    outputs = []
    for sample, own in enumerate(rows.view(inputs.batch_size, inputs.sequence_length, HIDDEN)):
        mixed = own @ attention.linear_qkv.weight.t() + attention.linear_qkv.bias
        heads = []
        for group in mixed.split((per_group + 2) * size, dim=1):
            parts = list(group.split(size, dim=1))
            if attention.rotary is not None:
                tables = [table[sample : sample + 1] for table in inputs.rotary_tables]
                parts[:-1] = [
                    attention.rotary.rotate(part[None, :, None], *tables)[0, :, 0].contiguous() for part in parts[:-1]
                ]
            *queries, key, value = parts
            heads += [attend_one_head(query, key, value) for query in queries]
        outputs.append(torch.cat(heads, dim=1) @ attention.linear_proj.weight.t() + attention.linear_proj.bias)
    return torch.cat(outputs)


def attend_one_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    rows = []
    for position, one in enumerate(query):
        scores = (key[: position + 1] @ one) / math.sqrt(len(one))
        rows.append(torch.softmax(scores, 0) @ value[: position + 1])
    return torch.stack(rows)


SHAPES: dict[str, dict[str, Any]] = {
    "heads": {},
    "groups of two": {"num_query_groups": 2, "group_query_attention": True},
    "one group": {"num_query_groups": 1, "group_query_attention": True},
    "rotary": {"position_embedding_type": "rope"},
    "rotary groups": {"position_embedding_type": "rope", "num_query_groups": 2, "rotary_interleaved": True},
}


@pytest.mark.parametrize("drop", [0.0, 1e-12], ids=["fused", "with explicit probabilities"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_equals_loops(changes: dict[str, Any], drop: float) -> None:
    """A rate too small to drop anything takes the path of dropout."""
    attention, make_inputs = make_attention(attention_dropout=drop, **changes)
    rows, inputs = make_rows(), make_inputs(make_batch(), training=True)
    expected = attend_in_loops(attention, rows, inputs)
    torch.testing.assert_close(attention(rows, inputs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("with_batch_mask", [False, True])
@pytest.mark.parametrize("drop", [0.0, 1e-12, 0.4])
def test_documents_do_not_see_each_other(drop: float, with_batch_mask: bool) -> None:
    """Changing the first of two documents leaves the second alone, and later tokens leave earlier ones alone."""
    attention, make_inputs = make_attention(attention_dropout=drop)
    batch = make_batch()
    start = 5
    mask = document_mask(batch, [start])
    batch["attention_mask"] = mask if with_batch_mask else mask[:, None]
    inputs = make_inputs(batch, training=True)
    rows = make_rows()
    before = attention(rows, inputs).view(2, SEQUENCE_LENGTH, HIDDEN)
    for changed in range(SEQUENCE_LENGTH):
        other = rows.view(2, SEQUENCE_LENGTH, HIDDEN).clone()
        other[:, changed] += 1
        after = attention(other.flatten(0, 1), inputs).view_as(before)
        end = start if changed < start else SEQUENCE_LENGTH
        untouched = [*range(changed), *range(end, SEQUENCE_LENGTH)]
        assert torch.equal(after[:, untouched], before[:, untouched]), changed
        assert not torch.equal(after[:, changed], before[:, changed])


def test_a_mask_of_documents_equals_documents_apart() -> None:
    attention, make_inputs = make_attention()
    batch = make_batch()
    batch["attention_mask"] = document_mask(batch, [5])
    rows = make_rows()
    together = attention(rows, make_inputs(batch, training=True)).view(2, SEQUENCE_LENGTH, HIDDEN)
    for part in (slice(0, 5), slice(5, SEQUENCE_LENGTH)):
        own = {"position_ids": batch["position_ids"][:, part], "sample_ids": batch["sample_ids"]}
        own_rows = rows.view(2, SEQUENCE_LENGTH, HIDDEN)[:, part]
        apart = attention(own_rows.flatten(0, 1), make_inputs(own, training=True))
        torch.testing.assert_close(together[:, part], apart.view_as(own_rows), rtol=0, atol=1e-12)


def test_dropout_drops_probabilities() -> None:
    """With values of one, a head's output is the sum of its kept probabilities: one on average, never below zero."""
    attention, make_inputs = make_attention(attention_dropout=0.5)
    size = attention.head_size
    with torch.no_grad():
        attention.linear_qkv.weight.view(4, 3, size, HIDDEN)[:, 2] = 0
        attention.linear_qkv.bias.view(4, 3, size)[:, 2] = 1
        attention.linear_proj.weight.zero_().fill_diagonal_(1)
        attention.linear_proj.bias.zero_()
    batch, rows = make_batch(400), make_rows(400)
    kept = attention(rows, make_inputs(batch, training=True)).detach()[:, [0, size, 2 * size]]
    assert (kept >= 0).all()
    assert kept.mean() == pytest.approx(1, abs=0.02)
    # The first query sees itself only: it is dropped or doubled.
    first = kept.view(400, SEQUENCE_LENGTH, 3)[:, 0]
    torch.testing.assert_close(first, first.round())
    assert set(first.round().flatten().tolist()) == {0, 2}
    undropped = attention(rows, make_inputs(batch, training=False)).detach()[:, 0]
    torch.testing.assert_close(undropped, torch.ones_like(undropped))


def test_masks_follow_sample_and_layer() -> None:
    config = model_config(attention_dropout=0.5, hidden_dropout=0.5)
    stage = make_stage(config, lone_channel())

    def losses(training: bool = True, **settings: int) -> torch.Tensor:
        stage.train(training)
        return run(stage, make_batch(**settings))

    assert torch.equal(losses(), losses())
    assert not torch.equal(losses(), losses(first_sample=41))
    assert not torch.equal(losses(), losses(first_sample=40 + 2**32))
    # A sample has the same masks wherever it stands in a batch.
    swapped = {name: tensor.flip(0) for name, tensor in make_batch().items()}
    stage.train()
    torch.testing.assert_close(run(stage, swapped).flip(0), losses(), rtol=0, atol=1e-12)
    plain = make_stage(model_config(), lone_channel())
    assert torch.equal(losses(training=False, first_sample=7), run(plain, make_batch()))
    other_seed = make_stage(config, lone_channel(), seed=6)
    with torch.no_grad():
        for own, other in zip(stage.parameters(), other_seed.parameters(), strict=True):
            other.copy_(own)
    assert not torch.equal(losses(), run(other_seed, make_batch()))


def run(stage: GPTStage, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return stage(batch).detach()
