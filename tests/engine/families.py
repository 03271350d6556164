"""A model of odd sizes from every family, and of what varies within it."""

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 307
ODD_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large, so that the logits differ enough for outputs that wander.
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Tests run with a context of 150 tokens, which decides between the two.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 7.0],
}
PHI3_SIZES = {**ODD_SIZES, "pad_token_id": 0, "eos_token_id": 1}

FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**ODD_SIZES),
    "llama-bias-tied-rope3": LlamaConfig(
        **ODD_SIZES,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    "mistral-window": MistralConfig(**ODD_SIZES, sliding_window=19),
    "mixtral": MixtralConfig(**ODD_SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen2-window": Qwen2Config(**ODD_SIZES, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen2-yarn": Qwen2Config(**ODD_SIZES, rope_parameters=YARN_ROPE),
    "qwen2-moe": Qwen2MoeConfig(
        **ODD_SIZES,
        moe_intermediate_size=37,
        num_experts=7,
        num_experts_per_tok=3,
        shared_expert_intermediate_size=45,
        mlp_only_layers=[1],
    ),
    "qwen3": Qwen3Config(**ODD_SIZES, head_dim=20),
    "qwen3-bias-tied-windows": Qwen3Config(
        **ODD_SIZES,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-moe": Qwen3MoeConfig(
        **ODD_SIZES,
        head_dim=20,
        moe_intermediate_size=37,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "phi3-window": Phi3Config(**PHI3_SIZES, sliding_window=23),
    "phi3-longrope-short": Phi3Config(**PHI3_SIZES, original_max_position_embeddings=160, rope_parameters={**LONGROPE}),
    "phi3-longrope-long": Phi3Config(
        **PHI3_SIZES, original_max_position_embeddings=1, rope_parameters={**LONGROPE, "attention_factor": 1.25}
    ),
    # Untied, since embeddings as large as Gemma's would echo the last token; and with caps low enough to matter.
    "gemma2": Gemma2Config(
        **ODD_SIZES,
        tie_word_embeddings=False,
        head_dim=20,
        query_pre_attn_scalar=24,
        sliding_window=21,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3": Gemma3TextConfig(
        **ODD_SIZES,
        tie_word_embeddings=False,
        head_dim=20,
        query_pre_attn_scalar=24,
        sliding_window=15,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
