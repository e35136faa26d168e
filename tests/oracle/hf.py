"""The oracle's weights in models of `transformers`, which judge the oracle."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.oracle.gpt import Shape, Weights


def hugging_face_model(shape: Shape, weights: Weights) -> Any:
    """The transformers model of the same function, with its own copy of the weights."""
    dtype = next(iter(weights.values())).dtype
    if shape.rotary:
        model, state = _rotary_model(shape), _rotary_state(shape, weights)
    else:
        model, state = _gpt2_model(shape), _gpt2_state(shape, weights)
    model = model.to(dtype).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if shape.tied else set()), missing
    return model


def split_qkv(shape: Shape, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of all query heads, of all key heads and of all value heads."""
    grouped = rows.view(shape.num_groups, -1, shape.head_size, *rows.shape[1:])
    query, key, value = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)


def _gpt2_model(shape: Shape) -> Any:
    config = transformers.GPT2Config(  # type: ignore[call-arg]
        vocab_size=shape.vocab_size,
        n_positions=shape.num_positions,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_inner=shape.ffn_size,
        activation_function={"tanh": "gelu_new", "erf": "gelu"}[shape.gelu],
        layer_norm_epsilon=shape.norm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def _gpt2_state(shape: Shape, weights: Weights) -> Weights:
    """GPT-2 keeps linear weights transposed."""
    state = {
        "transformer.wte.weight": weights["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": weights["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": weights["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": weights["decoder.final_layernorm.bias"],
    }
    if not shape.tied:
        state["lm_head.weight"] = weights["output_layer.weight"]
    names = {"ln_1": "input_layernorm", "ln_2": "pre_mlp_layernorm", "attn.c_proj": "self_attention.linear_proj"}
    names |= {"mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for their_name, our_name in names.items():
            for part in ("weight", "bias"):
                state[f"{theirs}.{their_name}.{part}"] = weights[f"{ours}.{our_name}.{part}"].t()
        for part in ("weight", "bias"):
            qkv = split_qkv(shape, weights[f"{ours}.self_attention.linear_qkv.{part}"])
            state[f"{theirs}.attn.c_attn.{part}"] = torch.cat(qkv).t()
    return state


def _rotary_model(shape: Shape) -> Any:
    """Llama; Qwen2 where queries, keys and values have a bias; StableLM for LayerNorm and partial rotation."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "max_position_embeddings": shape.num_positions,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": "eager",
    }
    rope = {"rope_type": "default", "rope_theta": shape.rotary_base, "partial_rotary_factor": shape.rotary_percent}
    if not shape.rms_norm:
        config = transformers.StableLmConfig(
            **common, layer_norm_eps=shape.norm_epsilon, use_qkv_bias=shape.qkv_bias, rope_parameters=rope
        )
        return transformers.StableLmForCausalLM(config)
    common |= {"rms_norm_eps": shape.norm_epsilon, "rope_parameters": rope, "head_dim": shape.head_size}
    if shape.qkv_bias:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))


def _rotary_state(shape: Shape, weights: Weights) -> Weights:
    parts = ("weight",) if shape.rms_norm else ("weight", "bias")
    state = {"model.embed_tokens.weight": weights["embedding.word_embeddings.weight"]}
    state |= {f"model.norm.{part}": weights[f"decoder.final_layernorm.{part}"] for part in parts}
    if not shape.tied:
        state["lm_head.weight"] = weights["output_layer.weight"]
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for part in parts:
            state[f"{theirs}.input_layernorm.{part}"] = weights[f"{ours}.input_layernorm.{part}"]
            state[f"{theirs}.post_attention_layernorm.{part}"] = weights[f"{ours}.pre_mlp_layernorm.{part}"]
        for part in ("weight", "bias") if shape.qkv_bias else ("weight",):
            qkv = split_qkv(shape, weights[f"{ours}.self_attention.linear_qkv.{part}"])
            state |= {f"{theirs}.self_attn.{which}_proj.{part}": rows for which, rows in zip("qkv", qkv, strict=True)}
        state[f"{theirs}.self_attn.o_proj.weight"] = weights[f"{ours}.self_attention.linear_proj.weight"]
        state[f"{theirs}.mlp.gate_proj.weight"] = weights[f"{ours}.mlp.linear_fc1.weight_gate"]
        state[f"{theirs}.mlp.up_proj.weight"] = weights[f"{ours}.mlp.linear_fc1.weight_up"]
        state[f"{theirs}.mlp.down_proj.weight"] = weights[f"{ours}.mlp.linear_fc2.weight"]
    return state
