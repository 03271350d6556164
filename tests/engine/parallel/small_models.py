"""Folders of small models that two, three or four processes can share."""

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "dtype": "float32",
    "eos_token_id": 1,
}
# By what is peculiar to each: biases, tied ends, norms of heads, windows and caps, two ropes, fused matrices, scaled
# parts, layers without positions, queries that grow, pairs that are rotated, parts side by side,
# MLPs without a gate, experts.
_EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
_GEMMA_4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-bias-tied": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gemma4": _GEMMA_4,
    "gemma4-moe": {
        **_GEMMA_4,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "ministral3-text": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.5,
            },
        },
    },
    "glm4": {"architectures": ["Glm4ForCausalLM"], "num_key_value_heads": 2},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "sliding_window": 8},
    "nemotron": {"architectures": ["NemotronForCausalLM"], "mlp_bias": True},
    "hunyuan": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "hunyuan-moe": {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": [5, 5, 5], "moe_topk": [2, 2, 2]},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 2},
    "apertus": {"architectures": ["ApertusForCausalLM"]},
    "granite-moe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "granite4": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "layer_types": ["attention"] * 3,
        "num_hidden_layers": 3,
    },
    # Each head's sink goes where its queries do.
    "granite-swa": {"architectures": ["GraniteSWAForCausalLM"], "sliding_window": 8, "attention_multiplier": 0.3},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_EXPERTS,
        "mlp_only_layers": [1],
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "attention_bias": True,
        "moe_intermediate_size": 64,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "moe_intermediate_size": 64,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "moe_intermediate_size": 64,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
}
# Its last layers read the keys and values of others, so it is not for stages.
GEMMA_4_SMALL = {
    **_GEMMA_4,
    "attention_k_eq_v": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 301,
}
_STATES = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_CONVS = {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "tie_word_embeddings": False}
# Of two layers of each kind in two stages. Inputs of a key head that lie together, or apart; experts that lie stacked.
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], **_STATES, **_EXPERTS, "mlp_only_layers": [1]},
    "qwen3.5": {"architectures": ["Qwen3_5ForCausalLM"], **_STATES},
    "qwen3.5-moe": {"architectures": ["Qwen3_5MoeForCausalLM"], **_STATES, **_EXPERTS},
    "granite4-h": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"] * 2,
        "num_hidden_layers": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 4,
        "mamba_d_state": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 72,
        "attention_multiplier": 0.4,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": 4,
        "mamba_n_heads": 8,
        "mamba_n_groups": 4,
        "mamba_d_state": 24,
        "mamba_d_ssm": 96,
        "ssm_multipliers": [0.4, 0.9, 0.7, 0.5, 0.8],
        "mlp_multipliers": [0.7, 0.9],
        "key_multiplier": 0.4,
        "ssm_out_multiplier": 0.9,
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M*EM-*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 20,
        "n_groups": 4,
        "ssm_state_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 48,
    },
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], **_CONVS, "conv_bias": True},
    "lfm2-moe": {"architectures": ["Lfm2MoeForCausalLM"], **_CONVS, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        "architectures": ["Lfm3ForCausalLM"],
        **_CONVS,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "sliding_window": 8,
        "attention_bias": True,
    },
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "gptq-one-group": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "fp8-blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "compressed-int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            }
        },
        "ignore": ["lm_head"],
    },
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def write_model(folder: Path, name: str = "qwen2", **fields: Any) -> Path:
    """A folder with a `config.json` alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({**SIZES, **(MODELS | WITH_STATES | {"gemma4-small": GEMMA_4_SMALL})[name], **fields})
    )
    return folder
