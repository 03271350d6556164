"""The `config.json` of gpt-oss, as its reader finds it. Free of torch."""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import GptOssConfig, ModelShape
from ..quantization_schemes import MXFP4_GROUP
from ..scalars import number, whole
from .llama import read_plain, require_activation
from .mixtures import experts_in_each_layer
from .sliding_windows import read_windows, sliding_layers


def read_gpt_oss(folder: Path, raw: Raw) -> ModelShape:
    """A mixture with sinks in its attention, every other layer with a window.

    Raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
    """
    require_activation(raw, "hidden_act", "silu")
    raw = {"head_dim": 64, "sliding_window": 128, **raw}
    bias = bool(raw.get("attention_bias", True))
    plain = read_plain(folder, raw, rms_norm_eps=1e-5, rope_theta=150000.0)
    _require_quantization(raw, plain)
    num_experts, num_chosen = whole(raw, "num_local_experts"), whole(raw, "num_experts_per_tok")
    return replace(
        plain,
        decoder_layer="gpt-oss",
        qkv_bias=bias,
        output_bias=bias,
        has_sinks=True,
        sliding_windows=read_windows(raw, sliding_layers(raw, lambda layer: layer % 2 == 0)),
        moe=experts_in_each_layer(plain, "gpt-oss", num_experts, num_chosen),
        gpt_oss=GptOssConfig(number(raw, "swiglu_limit", 7.0), number(raw, "swiglu_alpha", 1.702)),
    )


def _require_quantization(raw: Raw, shape: ModelShape) -> None:
    """Its experts are stacked, which no other way of quantising is read of."""
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4"):
        raise ModelError(f"quantization_config: quant_method is {method!r}; supported for gpt-oss: mxfp4")
    for name in ("hidden_size", "intermediate_size"):
        if method and (size := getattr(shape, name)) % MXFP4_GROUP:
            raise ModelError(f"{name} {size} is no multiple of {MXFP4_GROUP}, which share a scale in MXFP4")
