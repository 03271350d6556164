"""What the metadata of LFM2, Granite 4 `h` and Nemotron-H say, as a `config.json` would say it. Free of torch."""

from typing import Any

from ...errors import ModelError
from .metadata import HAS_PARTS_APART, Fields

Raw = dict[str, Any]
# As llama.cpp numbers how experts are chosen.
_SIGMOID = 2


def lfm2(fields: Fields) -> Raw:
    """Raises `ModelError` for those that make embeddings, or sounds."""
    for name, value in (("attention.causal", True), ("pooling_type", 0), ("attention.sliding_window", 0)):
        if (found := fields.get(name, value)) != value:
            raise ModelError(
                f"{fields.model.path}: {fields.architecture}.{name} is {found}: supported are models that generate text"
            )
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": fields.kinds({"shortconv.in_proj": "conv", "attn_q": "full_attention"}),
        "conv_L_cache": int(fields["shortconv.l_cache"]),
        "conv_bias": fields.has_in_any_layer("shortconv.in_proj.bias"),
        "norm_eps": float(fields["attention.layer_norm_rms_epsilon"]),
        # It is what the MLPs have, rounded already.
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(fields: Fields) -> Raw:
    _require_sigmoids(fields)
    return lfm2(fields) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": int(fields.get("leading_dense_block_count", 0)),
        "num_experts": int(fields["expert_count"]),
        "num_experts_per_tok": int(fields["expert_used_count"]),
        "moe_intermediate_size": int(fields["expert_feed_forward_length"]),
        "norm_topk_prob": fields.get("expert_weights_norm"),
        "routed_scaling_factor": fields.get("expert_weights_scale"),
    }


def granite_hybrid(fields: Fields) -> Raw:
    """Without what Granite's parts are scaled by."""
    num_experts = int(fields.get("expert_count", 0))
    gate = f"blk.0.ffn_gate{'_shexp' if num_experts else ''}.weight"
    heads, inner = int(fields["ssm.time_step_rank"]), int(fields["ssm.inner_size"])
    raw = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        HAS_PARTS_APART: True,
        "layer_types": fields.kinds({"ssm_in": "mamba", "attn_q": "attention"}),
        "shared_intermediate_size": fields.model.tensors[gate].shape[0],
        "num_local_experts": num_experts,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // int(fields["embedding_length"]),
        "mamba_n_groups": int(fields["ssm.group_count"]),
        "mamba_d_state": int(fields["ssm.state_size"]),
        "mamba_d_conv": int(fields["ssm.conv_kernel"]),
        "mamba_conv_bias": fields.has_in_any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has_in_any_layer("ssm_in.bias"),
    }
    if num_experts:
        raw["num_experts_per_tok"] = int(fields["expert_used_count"])
        raw["intermediate_size"] = fields.model.tensors["blk.0.ffn_down_exps.weight"].shape[-1]
    return raw


def nemotron_h(fields: Fields) -> Raw:
    """Its mixtures too."""
    heads = int(fields["ssm.time_step_rank"])
    raw = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": fields.kinds(
            {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
        ),
        "mamba_num_heads": heads,
        "mamba_head_dim": int(fields["ssm.inner_size"]) // heads,
        "n_groups": int(fields["ssm.group_count"]),
        "ssm_state_size": int(fields["ssm.state_size"]),
        "conv_kernel": int(fields["ssm.conv_kernel"]),
        "use_conv_bias": fields.has_in_any_layer("ssm_conv1d.bias"),
        "use_bias": fields.has_in_any_layer("ssm_in.bias"),
        "attention_bias": fields.has_in_any_layer("attn_q.bias"),
        "mlp_bias": fields.has_in_any_layer("ffn_up.bias"),
    }
    return raw | _nemotron_moe(fields) if fields.get("expert_count") else raw


def _nemotron_moe(fields: Fields) -> Raw:
    _require_sigmoids(fields)
    return {
        "n_routed_experts": int(fields["expert_count"]),
        "num_experts_per_tok": int(fields["expert_used_count"]),
        "moe_intermediate_size": int(fields["expert_feed_forward_length"]),
        "moe_shared_expert_intermediate_size": int(fields["expert_shared_feed_forward_length"]),
        "norm_topk_prob": fields.get("expert_weights_norm"),
        "routed_scaling_factor": fields.get("expert_weights_scale"),
        "n_group": fields.get("expert_group_count"),
        "topk_group": fields.get("expert_group_used_count"),
        "moe_latent_size": fields.get("moe_latent_size"),
    }


def _require_sigmoids(fields: Fields) -> None:
    if (found := fields.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise ModelError(
            f"{fields.model.path}: {fields.architecture}.expert_gating_func is {found}; supported: {_SIGMOID}, sigmoids"
        )
