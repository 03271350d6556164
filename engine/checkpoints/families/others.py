"""The `config.json` of Gemma, OLMo and Falcon, and of decoders within models that read images too. Free of torch.

Each reader raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, FalconConfig, MlpNames, ModelShape
from ..other_names import LLAVA_NAMES
from ..rope_config import RopeConfig, read_rope
from ..scalars import number, number_or_none, whole, whole_or_none
from .llama import context_length, read_plain, require_activation
from .sliding_windows import read_windows, sliding_layers
from .text_config import decoder_fields

GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def read_gemma2(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is set: a model that looks ahead cannot generate")
    # The head's size does not follow from the others here.
    raw = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, **raw}
    bias = bool(raw.get("attention_bias", False))
    return replace(
        read_plain(folder, raw),
        decoder_layer="gemma",
        qkv_bias=bias,
        output_bias=bias,
        activation="gelu_tanh",
        attention_scale=number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=number_or_none({"attn_logit_softcapping": 50.0, **raw}, "attn_logit_softcapping"),
        final_soft_cap=number_or_none({"final_logit_softcapping": 30.0, **raw}, "final_logit_softcapping"),
        embedding_scale=whole(raw, "hidden_size") ** 0.5,
        norm_offset=1.0,
        names=DecoderNames(layer_norms=GEMMA_NORMS),
        sliding_windows=read_windows(raw, sliding_layers(raw, lambda layer: layer % 2 == 0)),
    )


def read_gemma3(folder: Path, raw: Raw) -> ModelShape:
    """As Gemma 2, with norms on q and k instead of caps, and a rope of their own for the layers with a window."""
    pattern = whole(raw, "sliding_window_pattern", 6)
    is_sliding = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    local_theta = number_or_none(raw, "rope_local_base_freq") or 1e4
    raw = {"sliding_window": 4096, "attn_logit_softcapping": None, "final_logit_softcapping": None, **raw}
    return replace(
        read_gemma2(folder, {**raw, "rope_parameters": None}),
        qk_norm="heads",
        ropes=ropes_by_window(raw, is_sliding, number_or_none(raw, "rope_theta") or 1e6, local_theta),
        sliding_windows=read_windows(raw, is_sliding),
    )


def ropes_by_window(raw: Raw, is_sliding: tuple[bool, ...], theta: float, local_theta: float) -> tuple[RopeConfig, ...]:
    """One entry a layer: layers with a window have a rope of their own, which is not stretched with the others'."""
    ropes = raw.get("rope_parameters") or {}
    if of_full := ropes.get("full_attention"):
        full = read_rope(of_full, theta, raw, "full_attention.")
    else:
        full = read_rope(raw.get("rope_scaling") or {}, theta, raw)
    local = read_rope(ropes.get("sliding_attention") or {}, local_theta, raw, "sliding_attention.")
    return tuple(local if sliding else full for sliding in is_sliding)


def read_olmo2(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("attention_bias", False))
    plain = read_plain(folder, raw, rms_norm_eps=1e-5, rope_theta=5e5)
    names = DecoderNames(layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"))
    return replace(plain, decoder_layer="olmo", qkv_bias=bias, output_bias=bias, qk_norm="all", names=names)


def read_olmo3(folder: Path, raw: Raw) -> ModelShape:
    """As OLMo 2, three of four layers with a window."""
    is_sliding = sliding_layers(raw, lambda layer: (layer + 1) % 4 != 0)
    raw = {"sliding_window": 4096, **raw}
    theta = number_or_none(raw, "rope_theta") or 5e5
    plain = read_olmo2(folder, {**raw, "rope_parameters": None, "rope_scaling": None})
    return with_ropes_by_window(plain, raw, is_sliding, theta, theta)


def with_ropes_by_window(
    plain: ModelShape, raw: Raw, is_sliding: tuple[bool, ...], theta: float, local_theta: float
) -> ModelShape:
    """With windows too, and the context of layers without one. `plain`: read without its ropes."""
    ropes = ropes_by_window(raw, is_sliding, theta, local_theta)
    full = next((rope for rope, sliding in zip(ropes, is_sliding, strict=True) if not sliding), ropes[0])
    return replace(
        plain,
        ropes=ropes,
        sliding_windows=read_windows(raw, is_sliding),
        max_position_embeddings=context_length(raw, full),
    )


def read_exaone4(folder: Path, raw: Raw) -> ModelShape:
    """EXAONE 4: OLMo 2's layer with norms of each head; beside layers with a window those without know no positions."""
    interval = _window_interval(raw)
    is_sliding = sliding_layers(raw, lambda layer: (layer + 1) % interval != 0)
    windows = read_windows({"sliding_window": 4096, **raw}, is_sliding)
    plain = read_olmo2(folder, {"rope_theta": 1e4, **raw, "attention_bias": False})
    turning, idle = plain.ropes[0], RopeConfig(plain.ropes[0].theta, "none")
    has_windows = raw.get("sliding_window", 4096) is not None
    ropes = (idle if has_windows and not sliding else turning for sliding in is_sliding)
    return replace(plain, qk_norm="heads", sliding_windows=windows, ropes=tuple(ropes))


def _window_interval(raw: Raw) -> int:
    """Every which layer has no window, where `layer_types` does not say it."""
    pattern = raw.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return whole_or_none({"sliding_window_pattern": 4, **raw}, "sliding_window_pattern") or 1
    if not raw.get("layer_types"):
        raise ModelError(f"sliding_window_pattern is {pattern!r}: layer_types has to say which layers have a window")
    return 1


def read_falcon(folder: Path, raw: Raw) -> ModelShape:
    """Of the first architecture (1B, 7B) and the new one (11B, 40B, 180B), which has groups of heads."""
    if raw.get("alibi"):
        raise ModelError("alibi is set: positions as ALiBi biases are not supported, use a Falcon with rotary ones")
    if raw.get("quantization_config"):
        raise ModelError("quantization_config is set: quantised Falcon models are not supported, use the plain ones")
    require_activation(raw, "activation", "gelu")
    hidden_size, heads = whole(raw, "hidden_size"), whole(raw, "num_attention_heads")
    bias = bool(raw.get("bias", False))
    is_new = bool(raw.get("new_decoder_architecture", False))
    is_multi_query = bool(raw.get("multi_query", True)) and not is_new
    filled = {
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * hidden_size,
        "num_key_value_heads": 1 if is_multi_query else (raw.get("num_kv_heads") or heads) if is_new else heads,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    return replace(
        read_plain(folder, filled | raw),
        decoder_layer="falcon",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        has_fused_qkv=True,
        falcon=_falcon_layer(raw, is_new),
        activation="gelu",
        is_gated=False,
        norm="layer",
        norm_bias=True,
        names=DecoderNames(
            "transformer.word_embeddings",
            "transformer.h",
            "transformer.ln_f",
            mlp=MlpNames(("dense_h_to_4h",), "dense_4h_to_h"),
        ),
    )


def _falcon_layer(raw: Raw, is_new: bool) -> FalconConfig:
    num_norms = raw.get("num_ln_in_parallel_attn") or 2
    if is_new and num_norms == 2:
        return FalconConfig(True, "ln_attn", "ln_mlp")
    is_parallel = is_new or bool(raw.get("parallel_attn", True))
    return FalconConfig(is_parallel, "input_layernorm", None if is_parallel else "post_attention_layernorm")


def read_language_model(
    folder: Path, raw: Raw, readers: Mapping[str, Callable[[Path, Raw], ModelShape]], defaults: Raw
) -> ModelShape:
    """The decoder of a model that has eyes beside it, read by the type that its `text_config` has."""
    text = raw["text_config"]
    kind = text.get("model_type")
    if kind not in readers:
        raise ModelError(f"unsupported text_config.model_type {kind!r}; supported: {', '.join(readers)}")
    shape = readers[kind](folder, decoder_fields({**raw, "text_config": {**defaults, **text}}))
    language = "language_model.model"
    names = replace(
        shape.names,
        embedding=f"{language}.embed_tokens",
        layers=f"{language}.layers",
        final_norm=f"{language}.norm",
        head="language_model.lm_head",
    )
    return replace(
        shape, names=names, unread_parts=("vision_tower.", "multi_modal_projector."), other_names=LLAVA_NAMES
    )
