"""The `config.json` of families that attend to latents, DeepSeek's and those that took it over. Free of torch.

Each reader raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

import math
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import LatentAttentionConfig, ModelShape, MoeConfig
from ..rope_config import rope_fields, rope_place
from ..scalars import Section, require, whole, whole_or_none
from .glm import guessing_parts, read_experts
from .llama import read_plain, read_query_growth, read_rotary_dim, require_activation
from .sparse_layers import with_listed_layers


def read_deepseek_v2(folder: Path, raw: Raw) -> ModelShape:
    """DeepSeek-V2: experts that probabilities choose, of V2 in groups, of V2-Lite among all (arXiv 2405.04434)."""
    shape = _read(folder, {**raw, "rope_interleave": True})
    return replace(
        shape, mlp_bias=bool(raw.get("mlp_bias", False)), moe=_v2_experts(raw) if raw.get("n_routed_experts") else None
    )


def _v2_experts(raw: Raw) -> MoeConfig:
    require(raw, "scoring_func", "softmax")
    require(raw, "topk_method", "greedy", "group_limited_greedy")
    # What it would be multiplied by then, transformers, vLLM and DeepSeek's own code do not agree on.
    require(raw, "norm_topk_prob", False)
    if raw.get("topk_method") != "group_limited_greedy":
        raw = {**raw, "n_group": None}
    experts = read_experts(raw, first_dense=0, normalises=False)
    return replace(experts, has_correction=False, are_sigmoids=False)


def read_deepseek_v3(folder: Path, raw: Raw) -> ModelShape:
    """DeepSeek-V3, R1 and V3.1, Kimi K2 and Moonlight: experts that sigmoids choose, in groups (arXiv 2412.19437)."""
    require(raw, "scoring_func", "sigmoid")
    require(raw, "topk_method", "noaux_tc")
    return replace(_read(folder, raw), moe=read_experts(raw, first_dense=3, normalises=True))


def read_glm4_moe_lite(folder: Path, raw: Raw) -> ModelShape:
    """GLM-4.7-Flash: DeepSeek-V3 in small."""
    require(raw, "topk_method", "noaux_tc")
    moe = read_experts(raw, first_dense=1, normalises=True)
    return replace(_read(folder, {"rms_norm_eps": 1e-5, **raw}), moe=with_listed_layers(moe, raw))


def read_youtu(folder: Path, raw: Raw) -> ModelShape:
    """Youtu-LLM: DeepSeek's attention in a dense model."""
    return _read(folder, {"tie_word_embeddings": True, **raw})


def read_mistral4(folder: Path, raw: Raw) -> ModelShape:
    """Mistral Small 4: DeepSeek-V3 with experts that probabilities choose, and queries that grow as Ministral 3's."""
    if not (rope := raw.get("rope_parameters")):
        raise ModelError("rope_parameters is missing: its family stretches all positions")
    turned, plain_dim = whole(raw, "qk_rope_head_dim"), whole(raw, "qk_nope_head_dim")
    # It counts the numbers of a head that are not rotated too.
    if read_rotary_dim(raw, turned + plain_dim, turned / (turned + plain_dim)) != turned:
        raise ModelError("partial_rotary_factor is not what of a head qk_rope_head_dim is")
    shape = _read(folder, {**raw, "rope_parameters": {**rope, "partial_rotary_factor": None}})
    moe = read_experts(raw, first_dense=0, normalises=True)
    # Groups are weighed by their best two experts, as corrected ones are.
    is_grouped = moe.num_groups > 1
    moe = replace(moe, naming="mistral4", has_correction=is_grouped, stores_correction=False, are_sigmoids=False)
    return replace(shape, moe=replace(moe, has_wide_router=False), query_growth=read_query_growth(raw, shape.ropes[0]))


def _read(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    rank = whole(raw, "kv_lora_rank")
    latent = LatentAttentionConfig(
        rank=rank,
        query_rank=whole_or_none(raw, "q_lora_rank"),
        plain_dim=whole(raw, "qk_nope_head_dim"),
        rotary_dim=whole(raw, "qk_rope_head_dim"),
        value_dim=whole(raw, "v_head_dim"),
    )
    if read_rotary_dim(raw, latent.rotary_dim, 1.0) != latent.rotary_dim:
        raise ModelError("partial_rotary_factor is set: qk_rope_head_dim says what of a head is rotated")
    # What all heads attend to is one key of this size, as the cache has it.
    plain = read_plain(folder, {**raw, "num_key_value_heads": 1, "head_dim": rank + latent.rotary_dim})
    bias = bool(raw.get("attention_bias", False))
    return replace(
        plain,
        qkv_bias=bias,
        output_bias=bias,
        rotary_dim=latent.rotary_dim,
        has_rotary_pairs=bool(raw.get("rope_interleave", True)),
        attention_scale=latent.query_dim**-0.5 * _growth(raw) ** 2,
        latent_attention=latent,
        # Further layers guess further tokens, which is not supported.
        unread_parts=guessing_parts(raw, plain.num_hidden_layers),
    )


def _growth(raw: Raw) -> float:
    """What queries and keys are multiplied by where the context is stretched (YaRN's `mscale_all_dim`)."""
    rope = Section(rope_fields(raw), rope_place(raw))
    share = rope.number_or_none("mscale_all_dim") or 0
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not share:
        return 1.0
    return 1 + 0.1 * share * math.log(max(1.0, rope.number("factor")))
