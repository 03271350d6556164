"""What the metadata of LFM2, Granite 4 `h`, Falcon-H1 and Nemotron-H say, as a `config.json` would. Free of torch."""

from typing import Any

from ...errors import ModelError, shown
from .metadata import HAS_PARTS_APART, Fields

Raw = dict[str, Any]
# As llama.cpp numbers how experts are chosen.
_SIGMOID = 2


def lfm2(fields: Fields) -> Raw:
    """Raises `ModelError` for those that make embeddings, or sounds."""
    for name, value in (("attention.causal", True), ("pooling_type", 0), ("attention.sliding_window", 0)):
        if (found := fields.get(name, value)) != value:
            raise ModelError(f"{fields.within}{name} is {shown(found)}: supported are models that generate text")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": fields.kinds({"shortconv.in_proj": "conv", "attn_q": "full_attention"}),
        "conv_L_cache": fields.positive("shortconv.l_cache"),
        "conv_bias": fields.has_in_any_layer("shortconv.in_proj.bias"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        # It is what the MLPs have, rounded already.
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(fields: Fields) -> Raw:
    _require_sigmoids(fields)
    return lfm2(fields) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": fields.whole("leading_dense_block_count", 0),
        "num_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "norm_topk_prob": fields.get("expert_weights_norm"),
        "routed_scaling_factor": fields.number_or_none("expert_weights_scale"),
    }


def granite_hybrid(fields: Fields) -> Raw:
    """Without what Granite's parts are scaled by."""
    num_experts = fields.whole("expert_count", 0)
    gate = f"blk.0.ffn_gate{'_shexp' if num_experts else ''}.weight"
    raw = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        HAS_PARTS_APART: True,
        "layer_types": fields.kinds({"ssm_in": "mamba", "attn_q": "attention"}),
        "shared_intermediate_size": fields.tensor(gate).shape[0],
        "num_local_experts": num_experts,
        **_ibm_mamba(fields),
    }
    if num_experts:
        raw["num_experts_per_tok"] = fields.positive("expert_used_count")
        raw["intermediate_size"] = fields.tensor("blk.0.ffn_down_exps.weight", 3).shape[-1]
    return raw


def falcon_h1(fields: Fields) -> Raw:
    """What scales its parts is in their weights. Raises `ModelError` where that is not all of it."""
    if not fields.has("output.weight"):
        raise ModelError(
            "there is no tensor output.weight: where the embedding is the head too, Falcon-H1's files have not what "
            "scales the logits; use the checkpoint"
        )
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_rms_norm": fields.has_in_any_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **_ibm_mamba(fields),
    }


def _ibm_mamba(fields: Fields) -> Raw:
    heads, inner = fields.positive("ssm.time_step_rank"), fields.positive("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_ssm": inner,
        "mamba_n_groups": fields.positive("ssm.group_count"),
        "mamba_d_state": fields.positive("ssm.state_size"),
        "mamba_d_conv": fields.positive("ssm.conv_kernel"),
        "mamba_conv_bias": fields.has_in_any_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has_in_any_layer("ssm_in.bias"),
    }


def nemotron_h(fields: Fields) -> Raw:
    """Its mixtures too."""
    heads = fields.positive("ssm.time_step_rank")
    raw = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": fields.kinds(
            {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
        ),
        "mamba_num_heads": heads,
        "mamba_head_dim": fields.positive("ssm.inner_size") // heads,
        "n_groups": fields.positive("ssm.group_count"),
        "ssm_state_size": fields.positive("ssm.state_size"),
        "conv_kernel": fields.positive("ssm.conv_kernel"),
        "use_conv_bias": fields.has_in_any_layer("ssm_conv1d.bias"),
        "use_bias": fields.has_in_any_layer("ssm_in.bias"),
        "attention_bias": fields.has_in_any_layer("attn_q.bias"),
        "mlp_bias": fields.has_in_any_layer("ffn_up.bias"),
    }
    return raw | _nemotron_moe(fields) if fields.whole("expert_count", 0) else raw


def _nemotron_moe(fields: Fields) -> Raw:
    _require_sigmoids(fields)
    return {
        "n_routed_experts": fields.positive("expert_count"),
        "num_experts_per_tok": fields.positive("expert_used_count"),
        "moe_intermediate_size": fields.positive("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.positive("expert_shared_feed_forward_length"),
        "norm_topk_prob": fields.get("expert_weights_norm"),
        "routed_scaling_factor": fields.number_or_none("expert_weights_scale"),
        "n_group": fields.whole_or_none("expert_group_count"),
        "topk_group": fields.whole_or_none("expert_group_used_count"),
        "moe_latent_size": fields.whole_or_none("moe_latent_size"),
    }


def _require_sigmoids(fields: Fields) -> None:
    if (found := fields.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise ModelError(f"{fields.within}expert_gating_func is {shown(found)}; supported: {_SIGMOID}, sigmoids")
