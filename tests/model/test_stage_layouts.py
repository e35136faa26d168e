"""A GPT cut over tensor-parallel ranks and stages against the same one in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_overlap.comm import Ledger
from megatron_overlap.model import GPTStage
from megatron_overlap.tensor_parallel import Piece, info_of
from megatron_overlap.tensor_parallel.parameter import partition_of
from tests.comm.opened import lone_channel, open_channel
from tests.model.stages import (
    SEQUENCE_LENGTH,
    VOCABULARY,
    Parts,
    assemble,
    document_mask,
    losses_and_parts,
    make_batch,
    make_stage,
    model_config,
)
from tests.ranks import run_ranks

GPT2: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
DROPOUT = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 with dropout": {**GPT2, **DROPOUT},
    "attention dropout only": {**GPT2, "attention_dropout": 0.5},
    "hidden dropout only": {**GPT2, "hidden_dropout": 0.5},
    "llama with dropout": {**LLAMA, **DROPOUT},
    "qwen": {**LLAMA, "add_qkv_bias": True, "group_query_attention": True, "num_query_groups": 2},
}


def check_stage(changes: dict[str, Any], sequence_parallel: bool, with_documents: bool) -> Any:
    ledger = Ledger()
    stage = make_stage(model_config(**changes), open_channel(ledger=ledger), sequence_parallel=sequence_parallel)
    found = losses_and_parts(stage, batch_of(with_documents))
    ledger.assert_empty()
    return found


def batch_of(with_documents: bool) -> dict[str, torch.Tensor]:
    batch = make_batch()
    if with_documents:
        batch["attention_mask"] = document_mask(batch, [3, 8])
        batch["position_ids"] = torch.cat([torch.arange(3), torch.arange(5), torch.arange(4)]).expand(2, -1)
    return batch


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("world", "model", "with_documents"),
    [*((2, model, False) for model in MODELS), (4, "gpt2 with dropout", False), (2, "llama with dropout", True)],
)
def test_tensor_parallel_ranks_equal_one(world: int, model: str, with_documents: bool, sequence_parallel: bool) -> None:
    changes = MODELS[model]
    whole = make_stage(model_config(**changes), lone_channel())
    losses, weights, grads = losses_and_parts(whole, batch_of(with_documents))
    results = run_ranks(world, check_stage, (changes, sequence_parallel, with_documents), shim="late")
    for rank_losses, _, _ in results:
        torch.testing.assert_close(rank_losses, losses, rtol=0, atol=1e-9)
    initial = assemble(held for _, held, _ in results)
    expected = assemble([weights])
    assert initial.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(initial[name], tensor), name
    assembled = assemble(held for _, _, held in results)
    for name, tensor in assemble([grads]).items():
        torch.testing.assert_close(assembled[name], tensor, rtol=0, atol=1e-9, msg=name)


def test_no_initial_weight_but_norms_and_biases_is_trivial() -> None:
    stage = make_stage(model_config(), lone_channel())
    for name, param in stage.named_parameters():
        if name.endswith("bias"):
            assert not param.any(), name
        elif "layernorm" in name:
            assert torch.equal(param, torch.ones_like(param)), name
        else:
            rows = info_of(param).pieces[0].rows
            std = 0.3 / 6**0.5 if "linear_proj" in name or "linear_fc2" in name else 0.3
            assert param[:rows].std().item() == pytest.approx(std, rel=0.15), name
            assert not param[rows:].any(), name


# Stages


def chain(stages: list[GPTStage], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = None
    for stage in stages:
        rows = stage(batch, rows)
    assert rows is not None
    return rows


@pytest.mark.parametrize("model", MODELS)
def test_stages_in_turn_equal_one(model: str) -> None:
    config = model_config(**MODELS[model])
    whole = make_stage(config, lone_channel())
    stages = [make_stage(config, lone_channel(), layers=layers) for layers in (range(0, 1), range(1, 2), range(2, 3))]
    batch = make_batch()
    losses = chain(stages, batch)
    assert torch.equal(losses, whole(batch))
    assert losses.shape == (2, SEQUENCE_LENGTH)
    losses.sum().backward()
    whole(batch).sum().backward()
    grads: dict[str, torch.Tensor] = {}
    for stage in stages:
        for param in stage.parameters():
            name = info_of(param).pieces[0].name
            assert param.grad is not None, name
            grads[name] = grads[name] + param.grad if name in grads else param.grad
    for name, param in whole.named_parameters():
        # A gated weight has two pieces, of which the first names it here.
        gated = f"{name}_gate"
        torch.testing.assert_close(grads[gated if gated in grads else name], param.grad, rtol=0, atol=1e-10, msg=name)


def test_a_middle_stage_needs_positions_only() -> None:
    config = model_config(**MODELS["llama with dropout"])
    stage = make_stage(config, lone_channel(), layers=range(1, 2))
    batch = {name: tensor for name, tensor in make_batch().items() if name in ("position_ids", "sample_ids")}
    rows = torch.ones(2 * SEQUENCE_LENGTH, config.hidden_size, dtype=torch.float64)
    assert stage(batch, rows).shape == rows.shape
    with pytest.raises(AssertionError, match="needs the rows of the stage before"):
        stage(batch)


def test_without_labels_the_last_stage_gives_logits() -> None:
    stage = make_stage(model_config(), lone_channel())
    batch = make_batch()
    labels = batch.pop("labels")
    logits = stage(batch)
    assert logits.shape == (2 * SEQUENCE_LENGTH, VOCABULARY.padded)
    losses = torch.nn.functional.cross_entropy(logits[:, : VOCABULARY.size], labels.flatten(), reduction="none")
    torch.testing.assert_close(stage({**batch, "labels": labels}).flatten(), losses)


# Tied embeddings

EMBEDDING = "embedding.word_embeddings.weight"
FIRST, LAST, WHOLE = range(0, 1), range(2, 3), range(0, 3)


def tied_parameter(stage: nn.Module) -> nn.Parameter | None:
    return next((param for param in stage.parameters() if partition_of(param).tied), None)


@pytest.mark.parametrize(
    ("untied", "layers", "local_name", "uses", "shared_copy"),
    [
        (False, WHOLE, None, {EMBEDDING: 2}, None),
        (False, FIRST, EMBEDDING, {}, False),
        (False, range(1, 2), None, {}, None),
        (False, LAST, "output_layer.weight", {}, True),
        (True, WHOLE, None, {}, None),
        (True, FIRST, None, {}, None),
        (True, LAST, None, {}, None),
    ],
)
def test_the_tied_copy_bears_the_embeddings_name(
    untied: bool, layers: range, local_name: str | None, uses: dict[str, int], shared_copy: bool | None
) -> None:
    config = model_config(untie_embeddings_and_output_weights=untied)
    stage = make_stage(config, lone_channel(), layers=layers)
    assert {n: partition_of(p).uses for n, p in stage.named_parameters() if partition_of(p).uses != 1} == uses
    names = {name for param in stage.parameters() for name in (piece.name for piece in info_of(param).pieces)}
    assert ("output_layer.weight" in names) == (untied and layers != FIRST)
    tied = tied_parameter(stage)
    if local_name is None:
        assert tied is None
        return
    assert tied is stage.get_parameter(local_name)
    shape = (VOCABULARY.size, config.hidden_size)
    assert info_of(tied).pieces == (Piece(EMBEDDING, shape, (0, 0), VOCABULARY.size, 0, VOCABULARY.padded),)
    assert info_of(tied).shared_copy == shared_copy


def test_both_tied_copies_start_equal() -> None:
    first, last = (make_stage(model_config(), lone_channel(), layers=layers) for layers in (FIRST, LAST))
    copies = [tied_parameter(stage) for stage in (first, last)]
    assert copies[0] is not None
    assert copies[1] is not None
    assert torch.equal(*copies)
    untied = make_stage(model_config(untie_embeddings_and_output_weights=True), lone_channel())
    parts: Parts = [(info_of(p).pieces[0], p.detach()) for p in (untied.output_weight, copies[0])]
    assert not torch.equal(parts[0][1], parts[1][1])
