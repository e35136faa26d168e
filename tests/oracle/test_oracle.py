"""The oracle against `transformers`, torch's AdamW, and its own other forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.oracle import gpt, train
from tests.oracle.hf import hugging_face_model

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_groups": 4,
    "head_size": 8,
    "ffn_size": 48,
    "vocab_size": 37,
    "num_positions": 12,
}
GPT2 = gpt.Shape(**SIZES)
LLAMA = gpt.llama(**{**SIZES, "num_groups": 2})
SHAPES = {
    "gpt2": GPT2,
    "gpt2-erf-untied": replace(GPT2, gelu="erf", tied=False, norm_epsilon=1e-3),
    "llama": replace(LLAMA, rotary_base=500.0, norm_epsilon=1e-3),
    "llama-wide-heads-one-group": replace(LLAMA, head_size=16, num_groups=1),
    "qwen2-tied": replace(LLAMA, qkv_bias=True, tied=True),
    "stablelm-partial-rotary": replace(LLAMA, rms_norm=False, rotary_percent=0.5, num_groups=4),
}
TOKENS = torch.randint(SIZES["vocab_size"], (3, SIZES["num_positions"] + 1), generator=torch.Generator().manual_seed(1))
BATCH = train.Microbatch(TOKENS[:, :-1], TOKENS[:, 1:], torch.ones(3, SIZES["num_positions"]))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_oracle_equals_transformers(shape: gpt.Shape) -> None:
    pytest.importorskip("transformers")
    # Rotation and RMSNorm of transformers stay in single precision whatever the model's.
    tolerance = 1e-5 if shape.rotary else 1e-12
    weights = gpt.random_weights(shape, seed=2, dtype=torch.float64)
    model = hugging_face_model(shape, weights)
    output = model(BATCH.tokens, labels=BATCH.tokens, shift_labels=BATCH.labels.contiguous())
    torch.testing.assert_close(gpt.logits(shape, weights, BATCH.tokens), output.logits, rtol=tolerance, atol=tolerance)
    loss, gradients = train.loss_and_gradients(shape, weights, [BATCH])
    # The model's own loss is formed in single precision.
    assert loss == pytest.approx(output.loss.item(), rel=1e-5)
    functional.cross_entropy(output.logits.flatten(0, 1), BATCH.labels.flatten()).backward()
    expected = hugging_face_gradients(shape, weights, model)
    assert gradients.keys() == weights.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def hugging_face_gradients(shape: gpt.Shape, weights: gpt.Weights, model: torch.nn.Module) -> gpt.Weights:
    """The model's gradients under the oracle's names: a linear map of names, found by loading numbered elements."""
    numbered, start = {}, 0
    for name, value in weights.items():
        numbered[name] = torch.arange(start, start + value.numel(), dtype=torch.float64).view(value.shape)
        start += value.numel()
    places = hugging_face_model(shape, numbered)
    flat = torch.zeros(start, dtype=next(iter(weights.values())).dtype)
    for place, param in zip(places.parameters(), model.parameters(), strict=True):
        assert param.grad is not None
        flat[place.detach().long().flatten()] = param.grad.flatten()
    return {name: flat[number.long()] for name, number in numbered.items()}


def test_interleaved_rotation_is_the_half_style_with_other_rows() -> None:
    half = replace(LLAMA, rotary_percent=0.5)
    weights = gpt.random_weights(half, seed=3, dtype=torch.float64)
    interleaved = dict(weights)
    size = half.head_size // 2
    order = [i // 2 + i % 2 * (size // 2) for i in range(size)] + list(range(size, half.head_size))
    for name in weights:
        if "linear_qkv" in name:
            heads = weights[name].view(half.num_groups, -1, half.head_size, half.hidden_size).clone()
            heads[:, :-1] = heads[:, :-1, order]
            interleaved[name] = heads.view_as(weights[name])
    torch.testing.assert_close(
        gpt.logits(replace(half, rotary_interleaved=True), interleaved, BATCH.tokens),
        gpt.logits(half, weights, BATCH.tokens),
    )


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_training_equals_torch_adamw(clip: float) -> None:
    options = train.Options(lr=1e-2, weight_decay=0.1, clip_grad=clip, beta2=0.95)
    weights = gpt.random_weights(GPT2, seed=4, dtype=torch.float64)
    half = BATCH.loss_mask.clone()
    half[:, ::2] = 0
    batches = [[BATCH, replace(BATCH, loss_mask=half)]] * 4
    history = train.train(GPT2, weights, batches, options)
    params = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    groups = [
        {"params": [param for param in params.values() if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params.values() if param.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for microbatches in batches:
        optimizer.zero_grad()
        means = [
            (gpt.token_losses(GPT2, dict(params), each.tokens, each.labels) * each.loss_mask).sum()
            / each.loss_mask.sum()
            for each in microbatches
        ]
        torch.stack(means).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), clip or float("inf"))
        optimizer.step()
    assert history.grad_norms[-1] == pytest.approx(float(norm), rel=1e-9)
    for name, param in params.items():
        torch.testing.assert_close(history.weights[name], param.detach(), rtol=1e-9, atol=1e-12)


def test_the_reported_loss_weighs_tokens_equally() -> None:
    weights = gpt.random_weights(GPT2, seed=5, dtype=torch.float64)
    mask = torch.zeros_like(BATCH.loss_mask)
    mask[0, 0] = 1
    losses = gpt.token_losses(GPT2, weights, BATCH.tokens, BATCH.labels)
    loss, _ = train.loss_and_gradients(GPT2, weights, [BATCH, replace(BATCH, loss_mask=mask)])
    assert loss == pytest.approx(float((losses.sum() + losses[0, 0]) / (losses.numel() + 1)))


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 0, 0.0),
        ("constant", 5, 0.5),
        ("constant", 1000, 1.0),
        ("linear", 10, 1.0),
        ("linear", 60, 0.55),
        ("linear", 111, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.5 * (1 + 0.5**0.5)),
        ("inverse-square-root", 40, 0.5),
    ],
)
def test_learning_rate(style: str, samples: int, expected: float) -> None:
    options = train.Options(lr=1.0, min_lr=0.1, decay_style=style, decay_samples=110, warmup_samples=10)
    assert train.learning_rate(options, samples) == pytest.approx(expected)
