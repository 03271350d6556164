"""The `config.json` of a small model of every kind that the engine computes in another way on a GPU."""

from typing import Any

_SIZES: dict[str, Any] = {
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
# Shorter than the prompts, and no multiple of a block.
_WINDOW = 27
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
# Heads as large as Gemma 4's, untied for its embeddings' sake.
_GEMMA_4: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}

# With gpu_engine's "gate latents" and "gate states" they are all there are. Heads are of few sizes: attention's kernel
# is compiled for each, which takes seconds in float32.
GOLDEN: dict[str, dict[str, Any]] = {
    "golden biases": {
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "golden windows": {**_SIZES, "architectures": ["MistralForCausalLM"], "sliding_window": _WINDOW},
    # Caps so low that they count, and heads as large as Gemma's.
    "golden caps": {
        **_SIZES,
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "golden sinks": {
        **_SIZES,
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
        "swiglu_limit": 1.5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "golden head norms": {
        **_SIZES,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_experts": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    # Over all heads, of which a part is rotated; and experts that sigmoids choose.
    "golden wide norms": {
        **_SIZES,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 64,
        "rotary_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    # Of two sizes, with values that are keys, and experts beside MLPs.
    "golden large heads": {
        **_GEMMA_4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    },
    # Layers that read the keys of others, and have inputs of their own.
    "golden shared keys": {
        **_GEMMA_4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 2048,
    },
    # With biases, and an MLP without a gate.
    "golden layer norms": {
        **_SIZES,
        "architectures": ["NemotronForCausalLM"],
        "hidden_act": "relu2",
        "mlp_bias": True,
        "partial_rotary_factor": 0.5,
    },
    # Attention and MLP side by side, neighbours that are rotated, and a layer without positions.
    "golden side by side": {
        **_SIZES,
        "architectures": ["Cohere2ForCausalLM"],
        "logit_scale": 0.5,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATING,
    },
}
