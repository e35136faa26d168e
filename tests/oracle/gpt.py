"""A GPT in plain torch, in one process, written to be checked by reading; it shares no code with the package.

Weights are a dict of global names. `linear_qkv` holds, for each query group, the rows of its query heads, of its key
head and of its value head. A gated `linear_fc1` is two tensors, `weight_gate` and `weight_up`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The GPT-2 and GPT-3 type by default; see `llama` for the other one."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_size: int
    ffn_size: int
    vocab_size: int
    num_positions: int
    rotary: bool = False
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rms_norm: bool = False
    norm_epsilon: float = 1e-5
    gated: bool = False
    gelu: str = "tanh"
    bias: bool = True
    qkv_bias: bool = True
    tied: bool = True


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    h, f, d = shape.hidden_size, shape.ffn_size, shape.head_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (shape.vocab_size, h)}
    if not shape.rotary:
        shapes["embedding.position_embeddings.weight"] = (shape.num_positions, h)
    for layer in range(shape.num_layers):
        block = f"decoder.layers.{layer}"
        shapes |= _norm_shapes(f"{block}.input_layernorm", shape)
        shapes[f"{block}.self_attention.linear_qkv.weight"] = ((shape.num_heads + 2 * shape.num_groups) * d, h)
        shapes[f"{block}.self_attention.linear_proj.weight"] = (h, shape.num_heads * d)
        shapes |= _norm_shapes(f"{block}.pre_mlp_layernorm", shape)
        for part in ("_gate", "_up") if shape.gated else ("",):
            shapes[f"{block}.mlp.linear_fc1.weight{part}"] = (f, h)
            if shape.bias:
                shapes[f"{block}.mlp.linear_fc1.bias{part}"] = (f,)
        shapes[f"{block}.mlp.linear_fc2.weight"] = (h, f)
        if shape.qkv_bias:
            shapes[f"{block}.self_attention.linear_qkv.bias"] = ((shape.num_heads + 2 * shape.num_groups) * d,)
        if shape.bias:
            shapes[f"{block}.self_attention.linear_proj.bias"] = (h,)
            shapes[f"{block}.mlp.linear_fc2.bias"] = (h,)
    shapes |= _norm_shapes("decoder.final_layernorm", shape)
    if not shape.tied:
        shapes["output_layer.weight"] = (shape.vocab_size, h)
    return shapes


def _norm_shapes(name: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    parts = ("weight",) if shape.rms_norm else ("weight", "bias")
    return {f"{name}.{part}": (shape.hidden_size,) for part in parts}


def random_weights(shape: Shape, *, seed: int, dtype: torch.dtype) -> Weights:
    """Values of a size at which every tensor matters: biases and norm weights are far from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in weight_shapes(shape).items():
        values = torch.randn(size, generator=generator, dtype=dtype)
        centre = 1.0 if "layernorm.weight" in name else 0.0
        weights[name] = centre + values * (0.3 if len(size) == 1 else 1 / math.sqrt(size[-1]))
    return weights


def logits(shape: Shape, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """`[b, s]` ids -> `[b, s, vocab_size]`."""
    table = weights["embedding.word_embeddings.weight"]
    x = table[tokens]
    if not shape.rotary:
        x = x + weights["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(shape.num_layers):
        block = f"decoder.layers.{layer}"
        x = x + _attention(
            shape, weights, f"{block}.self_attention", _norm(shape, weights, f"{block}.input_layernorm", x)
        )
        x = x + _mlp(shape, weights, f"{block}.mlp", _norm(shape, weights, f"{block}.pre_mlp_layernorm", x))
    x = _norm(shape, weights, "decoder.final_layernorm", x)
    return x @ (table if shape.tied else weights["output_layer.weight"]).t()


def token_losses(shape: Shape, weights: Weights, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every token, `[b, s]`."""
    log_probabilities = torch.log_softmax(logits(shape, weights, tokens), dim=-1)
    return -log_probabilities.gather(-1, labels[..., None])[..., 0]


def _norm(shape: Shape, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if not shape.rms_norm:
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + shape.norm_epsilon)
    x = x * weights[f"{name}.weight"]
    return x if shape.rms_norm else x + weights[f"{name}.bias"]


def _linear(weights: Weights, name: str, x: torch.Tensor, part: str = "") -> torch.Tensor:
    y = x @ weights[f"{name}.weight{part}"].t()
    bias = weights.get(f"{name}.bias{part}")
    return y if bias is None else y + bias


def _mlp(shape: Shape, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if shape.gated:
        gate, up = (_linear(weights, f"{name}.linear_fc1", x, part) for part in ("_gate", "_up"))
        return _linear(weights, f"{name}.linear_fc2", gate * torch.sigmoid(gate) * up)
    return _linear(weights, f"{name}.linear_fc2", _gelu(_linear(weights, f"{name}.linear_fc1", x), shape.gelu))


def _gelu(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _attention(shape: Shape, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    heads_per_group = shape.num_heads // shape.num_groups
    mixed = _linear(weights, f"{name}.linear_qkv", x)
    mixed = mixed.view(batch, length, shape.num_groups, heads_per_group + 2, shape.head_size)
    outputs = []
    for group in range(shape.num_groups):
        key, value = mixed[:, :, group, -2], mixed[:, :, group, -1]
        for head in range(heads_per_group):
            query = mixed[:, :, group, head]
            outputs.append(_one_head(shape, query, key, value))
    return _linear(weights, f"{name}.linear_proj", torch.cat(outputs, dim=-1))


def _one_head(shape: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[b, s, d]` each."""
    if shape.rotary:
        query, key = _rotate(shape, query), _rotate(shape, key)
    scores = query @ key.transpose(-2, -1) / math.sqrt(shape.head_size)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value


def _rotate(shape: Shape, x: torch.Tensor) -> torch.Tensor:
    """Turn pair i of the first R dims by position * base^(-2i/R)."""
    size = int(shape.head_size * shape.rotary_percent)
    half = size // 2
    result = list(x.unbind(-1))
    positions = torch.arange(x.shape[1], dtype=torch.float64)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if shape.rotary_interleaved else (i, i + half)
        angle = positions * shape.rotary_base ** (-2 * i / size)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., first], x[..., second]
        result[first], result[second] = a * cos - b * sin, b * cos + a * sin
    return torch.stack(result, dim=-1)


def llama(**sizes: Any) -> Shape:
    """The Llama type: RoPE, RMSNorm, gated MLP, no biases, own output weights."""
    return Shape(
        **sizes,
        rotary=True,
        rms_norm=True,
        gated=True,
        bias=False,
        qkv_bias=False,
        tied=False,
    )
