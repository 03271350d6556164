"""The `config.json` of the families whose layer is Llama's, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .model_folder import Raw
from .model_shape import ModelShape, MoeConfig, QueryGrowth
from .rope_config import RopeConfig, read_rope
from .sliding_windows import qwen_windows, read_windows, sliding_layers


def read_plain(folder: Path, raw: Raw, rms_norm_eps: float = 1e-6, rope_theta: float = 10000.0) -> ModelShape:
    """What all families read the same way: a Llama without biases. The defaults are for fields left out."""
    heads, num_layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    # Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = read_rope(scaling, float(raw.get("rope_theta") or rope_theta), raw)
    return ModelShape(
        path=folder,
        decoder_layer="llama",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", rms_norm_eps)),
        max_position_embeddings=context_length(raw, rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        rotary_dim=head_dim,
        eos_token_ids=tuple(map(int, raw["eos_token_id"])),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def read_llama(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("attention_bias", False))
    plain = read_plain(folder, raw)
    return replace(plain, qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def read_granite(folder: Path, raw: Raw) -> ModelShape:
    """A Llama whose parts are scaled."""
    return replace(
        read_llama(folder, raw),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logits_scaling=float(raw.get("logits_scaling", 1.0)),
    )


def read_smollm3(folder: Path, raw: Raw) -> ModelShape:
    """A Llama with layers that know no positions."""
    plain = read_llama(folder, {"rope_theta": 2e6, "tie_word_embeddings": True, **raw})
    interval = int(raw.get("no_rope_layer_interval", 4))
    rotates = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in range(plain.num_hidden_layers)]
    if len(rotates) != plain.num_hidden_layers:
        raise ModelError(f"no_rope_layers has {len(rotates)} entries for {plain.num_hidden_layers} layers")
    return replace(
        plain,
        ropes=tuple(
            rope if rotated else RopeConfig(rope.theta, "none")
            for rope, rotated in zip(plain.ropes, rotates, strict=True)
        ),
        sliding_windows=qwen_windows(raw, lambda layer: not rotates[layer]),
    )


def read_mistral(folder: Path, raw: Raw, **defaults: float) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    windows = read_windows(raw, sliding_layers(raw, lambda layer: True))
    return replace(read_plain(folder, raw, **defaults), sliding_windows=windows)


def read_ministral3(folder: Path, raw: Raw) -> ModelShape:
    """A Mistral whose queries grow beyond the context that it was first trained for."""
    plain = read_mistral(folder, raw, rms_norm_eps=1e-5, rope_theta=1e6)
    beta = (raw.get("rope_parameters") or {}).get("llama_4_scaling_beta")
    growth = QueryGrowth(float(beta), plain.ropes[0].original_max_position_embeddings) if beta else None
    return replace(plain, query_growth=growth)


def read_qwen2(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    first = int(raw.get("max_window_layers", 28))
    windows = qwen_windows(raw, lambda layer: layer >= first)
    return replace(read_plain(folder, raw), qkv_bias=True, sliding_windows=windows)


def read_qwen3(folder: Path, raw: Raw) -> ModelShape:
    bias = bool(raw.get("attention_bias", False))
    return replace(read_qwen2(folder, raw), qkv_bias=bias, output_bias=bias, qk_norm=True)


def read_mixtral(folder: Path, raw: Raw) -> ModelShape:
    plain = read_mistral(folder, raw, rms_norm_eps=1e-5, rope_theta=1e6)
    moe = MoeConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_tok=int(raw["num_experts_per_tok"]),
        intermediate_size=plain.intermediate_size,
        norm_topk_prob=True,
        sparse_layers=(True,) * plain.num_hidden_layers,
        naming="mixtral",
    )
    return replace(plain, moe=moe)


def read_qwen2_moe(folder: Path, raw: Raw) -> ModelShape:
    last = int(raw.get("max_window_layers", 28))
    return replace(
        read_qwen2(folder, raw),
        qkv_bias=bool(raw.get("qkv_bias", True)),
        sliding_windows=qwen_windows(raw, lambda layer: layer % 2 == 0 and layer < last),
        moe=replace(_qwen_moe(raw), shared_expert_intermediate_size=int(raw["shared_expert_intermediate_size"])),
    )


def read_qwen3_moe(folder: Path, raw: Raw) -> ModelShape:
    windows = qwen_windows(raw, lambda layer: True)
    return replace(read_qwen3(folder, raw), sliding_windows=windows, moe=_qwen_moe(raw))


def _qwen_moe(raw: Raw) -> MoeConfig:
    step, dense = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or []
    return MoeConfig(
        num_experts=int(raw.get("num_experts") or raw["num_local_experts"]),
        num_experts_per_tok=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(int(raw["num_hidden_layers"]))
        ),
        naming="qwen",
    )


def read_glm4_moe(folder: Path, raw: Raw) -> ModelShape:
    """GLM-4.5 and later: a Llama of which half of each head is rotated, with experts that sigmoids choose."""
    require_activation(raw, "hidden_act", "silu")
    plain = read_plain(folder, raw, rms_norm_eps=1e-5)
    share = float(_rope_field(raw, "partial_rotary_factor") or 0.5)
    return replace(
        plain,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=bool(raw.get("use_qk_norm", False)),
        rotary_dim=int(plain.head_dim * share),
        moe=_sigmoid_moe(raw, first_dense=1, normalises=True),
        # Further layers guess further tokens, which is not supported.
        unread_parts=tuple(f"model.layers.{plain.num_hidden_layers + nth}." for nth in range(_num_guessing(raw))),
    )


def read_dots1(folder: Path, raw: Raw) -> ModelShape:
    """dots.llm1: a Qwen3 with such experts."""
    last = int(raw.get("max_window_layers", 62))
    windows = read_windows({"sliding_window": 4096, **raw}, sliding_layers(raw, lambda layer: layer >= last))
    return replace(
        read_qwen3(folder, raw), sliding_windows=windows, moe=_sigmoid_moe(raw, first_dense=0, normalises=False)
    )


def _sigmoid_moe(raw: Raw, first_dense: int, normalises: bool) -> MoeConfig:
    """As DeepSeek-V3 has it, without groups of experts. The defaults are for fields left out."""
    if int(raw.get("n_group") or 1) > 1:
        raise ModelError(f"n_group is {raw['n_group']}: experts in groups are not supported")
    inner, num_shared = int(raw["moe_intermediate_size"]), int(raw.get("n_shared_experts") or 0)
    first_dense = int(raw.get("first_k_dense_replace", first_dense))
    return MoeConfig(
        num_experts=int(raw.get("n_routed_experts") or raw["num_local_experts"]),
        num_experts_per_tok=int(raw["num_experts_per_tok"]),
        intermediate_size=inner,
        norm_topk_prob=bool(raw.get("norm_topk_prob", normalises)),
        sparse_layers=tuple(layer >= first_dense for layer in range(int(raw["num_hidden_layers"]))),
        naming="glm",
        shared_expert_intermediate_size=num_shared * inner or None,
        has_shared_gate=False,
        has_correction=True,
        routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
    )


def _num_guessing(raw: Raw) -> int:
    return int(raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0)


def read_phi3(folder: Path, raw: Raw) -> ModelShape:
    config = read_mistral(folder, raw, rms_norm_eps=1e-5)
    share = float(_rope_field(raw, "partial_rotary_factor") or 1.0)
    return replace(config, has_fused_projections=True, rotary_dim=int(config.head_dim * share))


def _rope_field(raw: Raw, name: str) -> Any:
    """Beside the rope's own fields (transformers 5) or the model's (before)."""
    return (raw.get("rope_parameters") or {}).get(name) or raw.get(name)


def require_activation(raw: Raw, field: str, expected: str) -> None:
    aliases = {expected, "swish"} if expected == "silu" else {expected}
    if (found := raw.get(field, expected)) not in aliases:
        raise ModelError(f"unsupported {field} {found!r}; supported: {expected}")


def context_length(raw: Raw, rope: RopeConfig) -> int:
    """How many positions the model knows. A config stretched by YaRN may still give the number before that."""
    own = int(raw["max_position_embeddings"])
    if rope.rope_type != "yarn":
        return own
    return max(own, int(rope.original_max_position_embeddings * rope.factor))
