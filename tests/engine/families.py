"""A model of odd sizes from every family, and of what varies within it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    LlamaConfig,
    MellumConfig,
    MiniMaxM2Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
)

from .state_families import STATE_MAKERS

VOCAB_SIZE = 307
_HEAD_DIM = 12
# The Triton kernels take heads from here on.
_GPU_HEAD_DIM = 16
_NUM_HEADS = 6
# Of a head's dimensions, where only a part is rotated.
_ROTATED_DIMS = 6


def odd_sizes(device: torch.device) -> dict[str, Any]:
    """Odd for every kernel of the CPU; for a GPU as odd as its kernels allow."""
    head_dim = _GPU_HEAD_DIM if device.type == "cuda" else _HEAD_DIM
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _NUM_HEADS * head_dim,
        "intermediate_size": 101,
        "num_hidden_layers": 3,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Large, so that the logits differ enough for outputs that wander.
        "initializer_range": 0.3,
    }


ODD_SIZES = odd_sizes(torch.device("cpu"))
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


# Of attention to latents, and of experts in groups.
_LATENT_ATTENTION = {
    "num_key_value_heads": _NUM_HEADS,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
_LATENT_SIZES = {
    **_LATENT_ATTENTION,
    "moe_intermediate_size": 37,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_GROUPS = {"n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
_GROUPS_OF_OTHERS = {"num_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
_STRETCHED = {**YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 1.3}

PHI3_TOKENS = {"pad_token_id": 0, "eos_token_id": 1}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1}


def longrope(sizes: dict[str, Any]) -> dict[str, Any]:
    """Tests run with a context of 150 tokens, which decides between the two."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": _ROTATED_DIMS * _NUM_HEADS / sizes["hidden_size"],
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.0, 3.0, 7.0],
    }


def falcon(sizes: dict[str, Any], **options: Any) -> FalconConfig:
    """Untied for Gemma's reason, and with a name of its own for the size of its MLP."""
    named = {"ffn_hidden_size": sizes["intermediate_size"], "tie_word_embeddings": False, "bos_token_id": 0}
    shared = {k: v for k, v in sizes.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return FalconConfig(**shared, **named, eos_token_id=1, **options)


def gemma4(sizes: dict[str, Any], num_pairs: int = 2, **options: Any) -> Gemma4TextConfig:
    """So many layers of each kind, with heads of two sizes; untied for Gemma's reason, and with a cap that matters."""
    return Gemma4TextConfig(
        **sizes | {"num_hidden_layers": 2 * num_pairs, "num_key_value_heads": 3},
        tie_word_embeddings=False,
        head_dim=20,
        global_head_dim=28,
        sliding_window=15,
        layer_types=["sliding_attention", "full_attention"] * num_pairs,
        final_logit_softcapping=7.0,
        **options,
    )


_MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": lambda sizes: LlamaConfig(**sizes),
    "llama-bias-tied-rope3": lambda sizes: LlamaConfig(
        **sizes,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    "mistral-window": lambda sizes: MistralConfig(**sizes, sliding_window=19),
    "mixtral": lambda sizes: MixtralConfig(**sizes, num_local_experts=5, num_experts_per_tok=2),
    "qwen2-window": lambda sizes: Qwen2Config(**sizes, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen2-yarn": lambda sizes: Qwen2Config(**sizes, rope_parameters=YARN_ROPE),
    "qwen2-moe": lambda sizes: Qwen2MoeConfig(
        **sizes,
        moe_intermediate_size=37,
        num_experts=7,
        num_experts_per_tok=3,
        shared_expert_intermediate_size=45,
        mlp_only_layers=[1],
    ),
    "qwen3": lambda sizes: Qwen3Config(**sizes, head_dim=20),
    "qwen3-bias-tied-windows": lambda sizes: Qwen3Config(
        **sizes,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-moe": lambda sizes: Qwen3MoeConfig(
        **sizes,
        head_dim=20,
        moe_intermediate_size=37,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "glm4-moe": lambda sizes: Glm4MoeConfig(
        **sizes,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=37,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "glm4-moe-groups": lambda sizes: Glm4MoeConfig(
        **sizes,
        moe_intermediate_size=37,
        n_routed_experts=9,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "deepseek-v2": lambda sizes: DeepseekV2Config(
        **sizes | _LATENT_SIZES,
        **_GROUPS,
        q_lora_rank=21,
        topk_method="group_limited_greedy",
        attention_bias=True,
        rope_parameters=_STRETCHED,
    ),
    "deepseek-v2-lite": lambda sizes: DeepseekV2Config(
        **sizes | _LATENT_SIZES,
        q_lora_rank=None,
        n_routed_experts=5,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    ),
    "deepseek-v3": lambda sizes: DeepseekV3Config(
        **sizes | _LATENT_SIZES, **_GROUPS, q_lora_rank=21, rope_parameters=_STRETCHED
    ),
    "mistral4": lambda sizes: Mistral4Config(
        **sizes | _LATENT_SIZES, **_GROUPS, q_lora_rank=21, rope_parameters={**_STRETCHED, "llama_4_scaling_beta": 0.4}
    ),
    "glm4-moe-lite": lambda sizes: Glm4MoeLiteConfig(
        **sizes | _LATENT_SIZES,
        q_lora_rank=21,
        n_routed_experts=6,
        num_experts_per_tok=2,
        rope_interleave=False,
    ),
    "dots1-windows": lambda sizes: Dots1Config(
        **sizes,
        head_dim=20,
        moe_intermediate_size=37,
        n_routed_experts=5,
        num_experts_per_tok=3,
        n_shared_experts=1,
        sliding_window=21,
        max_window_layers=1,
    ),
    "phi3-window": lambda sizes: Phi3Config(**sizes, **PHI3_TOKENS, sliding_window=23),
    "phi3-longrope-short": lambda sizes: Phi3Config(
        **sizes, **PHI3_TOKENS, original_max_position_embeddings=160, rope_parameters=longrope(sizes)
    ),
    "phi3-longrope-long": lambda sizes: Phi3Config(
        **sizes,
        **PHI3_TOKENS,
        original_max_position_embeddings=1,
        rope_parameters={**longrope(sizes), "attention_factor": 1.25},
    ),
    # Untied, since embeddings as large as Gemma's would echo the last token; and with caps low enough to matter.
    "gemma2": lambda sizes: Gemma2Config(
        **sizes,
        tie_word_embeddings=False,
        head_dim=20,
        query_pre_attn_scalar=24,
        sliding_window=21,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3": lambda sizes: Gemma3TextConfig(
        **sizes,
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
    "gemma4": lambda sizes: gemma4(
        sizes, attention_k_eq_v=True, num_global_key_value_heads=2, hidden_size_per_layer_input=0
    ),
    "gemma4-small": lambda sizes: gemma4(
        sizes,
        num_pairs=3,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma4-moe": lambda sizes: gemma4(
        sizes,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=37,
    ),
    "granite": lambda sizes: GraniteConfig(
        **sizes,
        attention_bias=True,
        embedding_multiplier=1.5,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
    ),
    "smollm3-windows": lambda sizes: SmolLM3Config(
        **sizes, **PHI3_TOKENS, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=21
    ),
    "olmo3": lambda sizes: Olmo3Config(
        **sizes,
        **PHI3_TOKENS,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # A limit so low that it counts.
    "gpt-oss": lambda sizes: GptOssConfig(
        **sizes,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=21,
        swiglu_limit=3.0,
        rope_parameters={**YARN_ROPE, "truncate": False},
    ),
    "falcon-groups": lambda sizes: falcon(sizes, new_decoder_architecture=True, num_kv_heads=2),
}


# Of layers that are like others'.
_FURTHER_MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    # Heads that are not rotated whole, and by neighbours.
    "glm": lambda sizes: GlmConfig(**sizes, **PHI3_TOKENS, head_dim=20),
    "glm4": lambda sizes: Glm4Config(**sizes, **PHI3_TOKENS, head_dim=20),
    "ernie": lambda sizes: Ernie4_5Config(**sizes, head_dim=16, use_bias=True, tie_word_embeddings=False),
    # Embeddings as large as these are would echo the last token, as Gemma's.
    "cohere": lambda sizes: CohereConfig(
        **sizes, **_TOKENS, attention_bias=True, logit_scale=0.3, tie_word_embeddings=False
    ),
    "cohere2": lambda sizes: Cohere2Config(
        **sizes,
        **_TOKENS,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    ),
    "cohere2-moe": lambda sizes: Cohere2MoeConfig(
        **sizes,
        **_TOKENS,
        head_dim=16,
        num_experts=5,
        num_experts_per_tok=2,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        prefix_dense_intermediate_size=77,
        sliding_window=21,
        rms_norm_eps=1e-5,
        logit_scale=0.3,
        tie_word_embeddings=False,
    ),
    # Of the others' size one of its answers says ten tokens over and over.
    "apertus": lambda sizes: ApertusConfig(**{**sizes, "intermediate_size": 117}, rope_parameters=LLAMA3_ROPE),
    "arcee": lambda sizes: ArceeConfig(**sizes, **_TOKENS, mlp_bias=True),
    "ministral": lambda sizes: MinistralConfig(
        **sizes,
        head_dim=16,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "solar-open": lambda sizes: SolarOpenConfig(
        **{name: size for name, size in sizes.items() if name != "intermediate_size"},
        **_TOKENS,
        head_dim=20,
        attention_bias=True,
        moe_intermediate_size=37,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=1,
    ),
    "stablelm": lambda sizes: StableLmConfig(**sizes, use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm-parallel": lambda sizes: StableLmConfig(**sizes, use_parallel_residual=True, partial_rotary_factor=0.5),
    "starcoder2": lambda sizes: Starcoder2Config(**sizes, **_TOKENS, sliding_window=27, tie_word_embeddings=False),
    "nemotron": lambda sizes: NemotronConfig(**sizes, mlp_bias=True),
    "ernie-moe": lambda sizes: Ernie4_5_MoeConfig(
        **sizes,
        moe_intermediate_size=37,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_end_index=1,
        tie_word_embeddings=False,
    ),
    "minimax-m2": lambda sizes: MiniMaxM2Config(
        **sizes,
        **_TOKENS,
        head_dim=20,
        num_local_experts=4,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmoe": lambda sizes: OlmoeConfig(**sizes, num_experts=6, num_experts_per_tok=2, eos_token_id=1),
    "hunyuan": lambda sizes: HunYuanDenseV1Config(
        **sizes,
        head_dim=20,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan-moe": lambda sizes: HunYuanMoEV1Config(**sizes, head_dim=20, num_experts=6, moe_topk=2),
    "exaone4": lambda sizes: Exaone4Config(
        **sizes | {"initializer_range": 0.5},
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "granite-moe": lambda sizes: GraniteMoeConfig(
        **sizes,
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=1.5,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
    ),
    "granite-swa": lambda sizes: GraniteSWAConfig(
        **sizes,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        layer_rope_theta=[1e4, 0, 1e6],
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        tie_word_embeddings=False,
    ),
    "granite4": lambda sizes: GraniteMoeHybridConfig(
        **sizes,
        mamba_n_heads=8,
        num_local_experts=0,
        shared_intermediate_size=77,
        position_embedding_type="rope",
        layer_types=["attention"] * 3,
        embedding_multiplier=1.5,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
    ),
    "youtu": lambda sizes: YoutuConfig(**sizes | _LATENT_ATTENTION, q_lora_rank=24, attention_bias=True),
    "hy3": lambda sizes: HYV3Config(
        **sizes,
        **_TOKENS,
        head_dim=20,
        moe_intermediate_size=37,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_layer_types=["dense", "sparse", "dense"],
    ),
    "exaone-moe": lambda sizes: ExaoneMoeConfig(
        **sizes,
        **_GROUPS_OF_OTHERS,
        head_dim=20,
        moe_intermediate_size=37,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mellum": lambda sizes: MellumConfig(
        **sizes,
        head_dim=20,
        moe_intermediate_size=37,
        num_local_experts=4,
        num_experts_per_tok=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "seed-oss": lambda sizes: SeedOssConfig(**sizes, head_dim=16, attention_out_bias=True),
}


@cache
def families(device: torch.device) -> dict[str, Any]:
    """`FAMILIES`, `FURTHER` and `WITH_STATES`, but of the sizes that tests on this device have."""
    sizes = odd_sizes(device)
    return {name: make(sizes) for name, make in (_MAKERS | _FURTHER_MAKERS | STATE_MAKERS).items()}


FAMILIES = {name: families(torch.device("cpu"))[name] for name in _MAKERS}
WITH_STATES = {name: families(torch.device("cpu"))[name] for name in STATE_MAKERS}
FURTHER = {name: families(torch.device("cpu"))[name] for name in _FURTHER_MAKERS}
