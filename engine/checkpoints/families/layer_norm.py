"""The `config.json` of Command R, StableLM, StarCoder2 and Nemotron, whose norms are LayerNorms. Free of torch.

Each reader raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, MlpNames, ModelShape, MoeConfig
from ..rope_config import RopeConfig
from ..scalars import number, number_or_none, require, whole, whole_or_none
from .llama import WITHOUT_GATE, read_plain, read_rotary_dim, require_activation
from .sliding_windows import read_windows, sliding_layers
from .sparse_layers import with_listed_layers


def read_cohere(folder: Path, raw: Raw) -> ModelShape:
    """Command R: attention and MLP side by side on one norm, rotary positions as GLM's."""
    require_activation(raw, "hidden_act", "silu")
    if raw.get("use_qk_norm"):
        raise ModelError("use_qk_norm is set: norms of queries and keys that take a mean off are not supported")
    # The first ones give the context beside what they were first trained for.
    context = raw.get("model_max_length") or raw.get("max_position_embeddings") or 8192
    filled = {"tie_word_embeddings": True}
    raw = {**raw, "rms_norm_eps": raw.get("layer_norm_eps", 1e-5)}
    bias = bool(raw.get("attention_bias", False))
    return replace(
        read_plain(folder, filled | raw | {"max_position_embeddings": context}, rope_theta=5e5),
        decoder_layer="parallel",
        norm="layer",
        qkv_bias=bias,
        output_bias=bias,
        has_rotary_pairs=True,
        logits_scaling=1 / number(raw, "logit_scale", 0.0625),
        names=DecoderNames(layer_norms=("input_layernorm",)),
    )


def read_cohere2(folder: Path, raw: Raw) -> ModelShape:
    """Command R7B and A: three of four layers with a window, and the fourth without positions."""
    pattern = whole(raw, "sliding_window_pattern", 4)
    is_sliding = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    windows = read_windows({"sliding_window": 4096, **raw}, is_sliding)
    plain = read_cohere(folder, {"rope_theta": 1e4, **raw})
    ropes = (
        rope if window else RopeConfig(rope.theta, "none") for rope, window in zip(plain.ropes, windows, strict=True)
    )
    return replace(plain, sliding_windows=windows, ropes=tuple(ropes))


def read_cohere2_moe(folder: Path, raw: Raw) -> ModelShape:
    """Command with experts, and norms that may be Llama's; the first layers may have an MLP, and turn in any case."""
    num_dense, pattern = whole_or_none(raw, "first_k_dense_replace") or 0, whole(raw, "sliding_window_pattern", 4)
    dense_pattern = whole(raw, "prefix_dense_sliding_window_pattern", 1)
    is_sliding = sliding_layers(
        raw,
        lambda layer: bool((layer + 1) % dense_pattern if layer < num_dense else (layer - num_dense + 1) % pattern),
    )
    windows = read_windows({"sliding_window": 4096, **raw}, is_sliding)
    dense_size = raw.get("prefix_dense_intermediate_size") or raw["intermediate_size"]
    plain = read_cohere(folder, {"rope_theta": 1e4, "head_dim": 128, **raw, "intermediate_size": dense_size})
    moe = with_listed_layers(_cohere_experts(raw, num_dense), raw)
    ropes = (
        rope if window or (dense_pattern == 1 and not is_sparse) else RopeConfig(rope.theta, "none")
        for rope, window, is_sparse in zip(plain.ropes, windows, moe.sparse_layers, strict=True)
    )
    shape = replace(plain, moe=moe, sliding_windows=windows, ropes=tuple(ropes))
    eps = number_or_none(raw, "rms_norm_eps")
    return shape if eps is None else replace(shape, norm="rms", rms_norm_eps=eps)


def _cohere_experts(raw: Raw, num_dense: int) -> MoeConfig:
    """Chosen by their logits. `num_dense`: how many layers have none."""
    require(raw, "expert_selection_fn", "softmax", "sigmoid")
    require(raw, "shared_expert_combination_strategy", "average", "sum")
    inner, num_shared = whole(raw, "intermediate_size"), whole_or_none(raw, "num_shared_experts") or 0
    are_sigmoids = raw.get("expert_selection_fn") == "sigmoid"
    share = 0.5 if num_shared and raw.get("shared_expert_combination_strategy", "average") == "average" else 1.0
    return MoeConfig(
        num_experts=whole(raw, "num_experts", 8),
        num_experts_per_tok=whole(raw, "num_experts_per_tok", 2),
        intermediate_size=inner,
        # The shares of the chosen among themselves are the softmax of their logits.
        norm_topk_prob=not are_sigmoids or bool(raw.get("norm_topk_prob", True)),
        sparse_layers=tuple(layer >= num_dense for layer in range(whole(raw, "num_hidden_layers"))),
        naming="glm",
        shared_expert_intermediate_size=num_shared * inner or None,
        has_shared_gate=False,
        has_correction=are_sigmoids,
        stores_correction=False,
        routed_scaling_factor=share,
        shared_scaling_factor=share,
    )


def read_stablelm(folder: Path, raw: Raw) -> ModelShape:
    """StableLM: a quarter of each head is rotated; some have attention and MLP side by side."""
    require_activation(raw, "hidden_act", "silu")
    if raw.get("qk_layernorm"):
        raise ModelError("qk_layernorm is set: norms of queries and keys that take a mean off are not supported")
    plain = read_plain(folder, {"rms_norm_eps": raw.get("layer_norm_eps", 1e-5)} | raw)
    shape = replace(
        plain,
        norm="layer",
        norm_bias=True,
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.25),
    )
    if not raw.get("use_parallel_residual"):
        return shape
    return replace(shape, decoder_layer="parallel", names=DecoderNames(layer_norms=("input_layernorm",)))


def read_starcoder2(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "gelu_pytorch_tanh")
    filled = {"tie_word_embeddings": True, "rms_norm_eps": raw.get("norm_epsilon", 1e-5)}
    bias = bool(raw.get("use_bias", True))
    return replace(
        read_plain(folder, filled | raw),
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation="gelu_tanh",
        is_gated=False,
        sliding_windows=read_windows(raw, sliding_layers(raw, lambda layer: True)),
        names=DecoderNames(mlp=MlpNames(("c_fc",), "c_proj")),
    )


def read_nemotron(folder: Path, raw: Raw) -> ModelShape:
    """Nemotron 3 and 4, and Minitron: norms' weights are kept less one, and half of each head is rotated."""
    require_activation(raw, "hidden_act", "relu2")
    bias = bool(raw.get("attention_bias", False))
    plain = read_plain(folder, {"rms_norm_eps": raw.get("norm_eps", 1e-5)} | raw)
    return replace(
        plain,
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation="relu2",
        is_gated=False,
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.5),
        names=WITHOUT_GATE,
    )
