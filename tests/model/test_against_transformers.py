"""Logits, loss and gradients of the model are those of `transformers` with the same random weights, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_overlap.comm import Channel
from megatron_overlap.model import GPTStage
from tests.comm.opened import open_channel
from tests.model.stages import VOCABULARY, Parts, assemble, make_batch, make_stage, model_config, parts
from tests.oracle import gpt
from tests.oracle.hf import hugging_face_model
from tests.oracle.test_oracle import hugging_face_gradients
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "ffn_size": 48, "vocab_size": 37, "num_positions": 15}
LLAMA = {
    "position_embedding_type": "rope",
    "rotary_base": 500.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, tuple[gpt.Shape, dict[str, Any]]] = {
    "gpt2": (gpt.Shape(**SIZES, num_heads=4, num_groups=4, head_size=8), {}),
    "llama": (gpt.llama(**SIZES, num_heads=4, num_groups=2, head_size=8, rotary_base=500.0), LLAMA),
}
BOUND = 1e-4


def _set_weights(stage: GPTStage, weights: gpt.Weights) -> None:
    for (piece, _), target in zip(parts(stage, gradients=False), _targets(stage), strict=True):
        place = tuple(slice(start, start + size) for start, size in zip(piece.offset, target.shape, strict=True))
        target.copy_(weights[piece.name][place])


def _targets(stage: GPTStage) -> list[torch.Tensor]:
    return [
        param.data[piece.local_start : piece.local_start + piece.rows]
        for param in stage.parameters()
        for piece in param.info.pieces
    ]


def _run(model: str, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, Parts]:
    """This rank's true logits `[n, own columns]`, the losses, and the gradients of their mean."""
    shape, settings = MODELS[model]
    channel: Channel = open_channel()
    config = model_config(hidden_size=32, ffn_hidden_size=48, kv_channels=8, **settings)
    stage = make_stage(config, channel, sequence_parallel=sequence_parallel, dtype=torch.float32)
    _set_weights(stage, gpt.random_weights(shape, seed=3, dtype=torch.float32))
    batch = make_batch()
    with torch.no_grad():
        logits = stage({name: value for name, value in batch.items() if name != "labels"})
    first = channel.rank * logits.shape[1]
    losses = stage(batch)
    losses.mean().backward()
    return logits[:, : max(0, VOCABULARY.size - first)], losses.detach(), parts(stage, gradients=True)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("model", MODELS)
def test_the_model_is_that_of_transformers(model: str, tp: int, sequence_parallel: bool) -> None:
    shape, _ = MODELS[model]
    weights = gpt.random_weights(shape, seed=3, dtype=torch.float32)
    theirs = hugging_face_model(shape, weights)
    batch = make_batch()
    expected = theirs(batch["tokens"]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(expected, batch["labels"].flatten())
    loss.backward()

    found = run_ranks(tp, _run, (model, sequence_parallel))
    torch.testing.assert_close(torch.cat([logits for logits, _, _ in found], dim=1), expected, rtol=BOUND, atol=BOUND)
    for _, losses, _ in found:
        assert float(losses.mean()) == pytest.approx(loss.item(), rel=BOUND)
    gradients = assemble([held for _, _, held in found])
    wanted = hugging_face_gradients(shape, weights, theirs)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=BOUND, atol=BOUND, msg=lambda t, n=name: f"{n}: {t}")
