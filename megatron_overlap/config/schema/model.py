"""Shape of the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_overlap.config.kinds import Normalization, PositionEmbedding
from megatron_overlap.config.options import PROBABILITY, Limit, Spelling, above, at_least, option, required, resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model and its initial weights."""

    num_layers: int = required("Transformer layers of the whole model.", limit=at_least(1))
    hidden_size: int = required("Width of the residual stream.", limit=at_least(1))
    ffn_hidden_size: int = resolved(
        "Width inside the MLP; 4 x hidden size, or 8/3 x hidden size rounded down to a multiple of 64 with --swiglu.",
        limit=at_least(1),
    )
    num_attention_heads: int = required("Query heads of the attention.", limit=at_least(1))
    kv_channels: int = resolved("Width of one head; hidden size / heads.", limit=at_least(1))
    group_query_attention: bool = option(False, "Let several query heads share one key and value head.")
    num_query_groups: int = resolved(
        "Key and value heads with --group-query-attention (1 when not given); otherwise the number of heads.",
        limit=at_least(1),
    )
    add_bias_linear: bool = option(
        True, "Biases in the linear layers.", spelling=Spelling(off=("--disable-bias-linear",))
    )
    add_qkv_bias: bool = option(False, "Bias in the query, key and value layer, whatever the others have.")
    seq_length: int = required(
        "Tokens of a sample.", limit=at_least(1), spelling=Spelling(aliases=("--encoder-seq-length",))
    )
    max_position_embeddings: int = required("Longest sequence that the model has positions for.", limit=at_least(1))
    position_embedding_type: PositionEmbedding = option(
        PositionEmbedding.LEARNED_ABSOLUTE,
        "How a token learns its position.",
        spelling=Spelling(constants={"--use-rotary-position-embeddings": "rope"}),
        refused={
            "relative": "belongs to T5; use learned_absolute, rope or none",
            "yarn": "is not supported; use rope",
            "mrope": "belongs to multimodal models; use rope",
            "alibi": "belongs to a fork of Megatron; use rope",
        },
    )
    add_position_embedding: bool = option(
        True,
        "Learned positions; the old way to say that rotary positions are the only ones.",
        spelling=Spelling(off=("--no-position-embedding",)),
    )
    rotary_base: float = option(10000.0, "Base of the rotary frequencies.", limit=above(0))
    rotary_percent: float = option(1.0, "Part of a head that is rotated.", limit=Limit(above=0, at_most=1))
    rotary_interleaved: bool = option(False, "Rotate neighbouring channels (GPT-J) instead of the two halves.")
    rotary_seq_len_interpolation_factor: float | None = option(None, "Divide rotary positions by this.", limit=above(0))
    normalization: Normalization = option(Normalization.LAYER_NORM, "Kind of norm.")
    norm_epsilon: float = option(
        1e-5, "Added to the variance in a norm.", limit=above(0), spelling=Spelling(old=("--layernorm-epsilon",))
    )
    swiglu: bool = option(False, "Gated SiLU in the MLP.")
    openai_gelu: bool = option(False, "The tanh form of GELU.")
    bias_gelu_fusion: bool = option(True, "Megatron's fused bias and GELU, which uses the tanh form.")
    untie_embeddings_and_output_weights: bool = option(False, "Give the output layer its own weight.")
    hidden_dropout: float = option(0.1, "Dropout of the residual stream.", limit=PROBABILITY)
    attention_dropout: float = option(0.1, "Dropout of the attention probabilities.", limit=PROBABILITY)
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", limit=at_least(0))
    vocab_size: int | None = option(
        None, "Size of the vocabulary before padding; overrides the tokenizer's own.", limit=at_least(1)
    )
    make_vocab_size_divisible_by: int = option(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size.", limit=at_least(1)
    )

    @property
    def gelu_approximate(self) -> str:
        """Return torch's name for the form of GELU."""
        return "tanh" if self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear) else "none"
