"""Models of odd sizes whose layers mostly have a state: tests/engine/models/test_layers_with_states.py has them."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

STATE_SIZES = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {
    "moe_intermediate_size": 37,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 45,
}
_OLMO_SIZES = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# The 12 heads of 12 numbers, or of 16 on a GPU, that Mamba makes of twice the hidden size.
_MAMBA_SIZES = {"mamba_n_heads": 12, "mamba_d_state": 20, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_NEMOTRON_H_SIZES = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 24,
    "n_groups": 3,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 37,
    "moe_shared_expert_intermediate_size": 45,
    "routed_scaling_factor": 1.7,
    # As published ones, whose steps have no least length; transformers has this one for prompts, and none for answers.
    "time_step_min": 1e-30,
}


def falcon_h1(sizes: dict[str, Any], **options: Any) -> FalconH1Config:
    return FalconH1Config(
        **sizes,
        **_MAMBA_SIZES,
        mamba_d_ssm=72,
        head_dim=16,
        embedding_multiplier=5.6,
        lm_head_multiplier=0.3,
        key_multiplier=0.4,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.9,
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.6,
        ssm_multipliers=[0.35, 0.25, 0.7, 0.5, 0.4],
        mlp_multipliers=[0.8, 0.6],
        **options,
    )


STATE_MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "qwen3-next": lambda sizes: Qwen3NextConfig(**sizes | STATE_SIZES, **_EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": lambda sizes: Qwen3_5TextConfig(**sizes | STATE_SIZES, tie_word_embeddings=False),
    "qwen3.5-moe": lambda sizes: Qwen3_5MoeTextConfig(
        **{name: size for name, size in (sizes | STATE_SIZES).items() if name != "intermediate_size"}, **_EXPERTS
    ),
    # Embeddings must not be small beside what norms have made of the layers' outputs, as OLMo's.
    "olmo-hybrid": lambda sizes: OlmoHybridConfig(
        **sizes | {"initializer_range": 0.5},
        **_OLMO_SIZES,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters={"rope_theta": None},
    ),
    "olmo-hybrid-turning": lambda sizes: OlmoHybridConfig(
        **sizes | {"initializer_range": 0.5},
        **_OLMO_SIZES,
        attention_bias=True,
        linear_allow_neg_eigval=False,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
    "granite4-h": lambda sizes: GraniteMoeHybridConfig(
        **sizes,
        **_MAMBA_SIZES,
        num_local_experts=0,
        shared_intermediate_size=77,
        layer_types=["mamba", "attention", "mamba"],
        embedding_multiplier=1.5,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
        logits_scaling=3.0,
    ),
    "granite4-h-moe": lambda sizes: GraniteMoeHybridConfig(
        **sizes,
        **_MAMBA_SIZES | {"mamba_n_groups": 1},
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=77,
        layer_types=["mamba", "attention", "mamba"],
        mamba_proj_bias=True,
        attention_multiplier=0.4,
        residual_multiplier=0.7,
    ),
    "bamba": lambda sizes: BambaConfig(
        **sizes, **_MAMBA_SIZES, attn_layer_indices=[1], mamba_conv_bias=False, time_step_limit=(0.3, 1.1)
    ),
    "falcon-h1": lambda sizes: falcon_h1(sizes, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-h1-without-norms": lambda sizes: falcon_h1(sizes, mamba_conv_bias=False),
    "nemotron-h": lambda sizes: NemotronHConfig(
        **{name: size for name, size in sizes.items() if name != "num_hidden_layers"},
        **_NEMOTRON_H_SIZES,
        layers_block_type=["mamba", "moe", "mamba", "attention", "mlp"],
    ),
    "nemotron-h-latents": lambda sizes: NemotronHConfig(
        **{name: size for name, size in sizes.items() if name != "num_hidden_layers"},
        **_NEMOTRON_H_SIZES | {"n_groups": 1},
        moe_latent_size=26,
        use_bias=True,
        layers_block_type=["attention", "moe", "mamba", "mamba", "moe"],
    ),
    "lfm2": lambda sizes: Lfm2Config(
        **sizes, full_attn_idxs=[1], conv_bias=True, block_multiple_of=16, tie_word_embeddings=False
    ),
    "lfm2-moe": lambda sizes: Lfm2MoeConfig(
        **sizes,
        layer_types=["full_attention", "conv", "conv"],
        moe_intermediate_size=37,
        num_experts=6,
        num_experts_per_tok=2,
        num_dense_layers=1,
        routed_scaling_factor=1.7,
        tie_word_embeddings=False,
    ),
    "lfm3": lambda sizes: Lfm3Config(
        **sizes,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        head_dim=16,
        layer_types=["conv", "sliding_attention", "full_attention"],
        sliding_window=21,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.75},
        },
        tie_word_embeddings=False,
    ),
}
