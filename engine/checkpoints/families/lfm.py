"""The `config.json` of Liquid's models, of whose layers most are short convolutions. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, MlpNames, ModelShape, MoeConfig
from ..scalars import number, whole, whole_or_none
from ..state_layers import ShortConvConfig
from .layer_types import read_layer_types
from .llama import read_plain
from .others import ropes_by_window
from .sliding_windows import read_windows

_NAMES = DecoderNames(
    final_norm="model.embedding_norm",
    layer_norms=("operator_norm", "ffn_norm"),
    mlp=MlpNames(("w1", "w3"), "w2", "feed_forward"),
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    attention_output="out_proj",
)

_LFM3_NORMS = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_LFM3_ROPES = {
    "sliding_attention": {"rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def read_lfm2(folder: Path, raw: Raw) -> ModelShape:
    return _read_lfm2(folder, {**raw, "intermediate_size": _inner_size(raw)})


def read_lfm2_moe(folder: Path, raw: Raw) -> ModelShape:
    """A mixture but for its first layers."""
    if not raw.get("use_expert_bias", True):
        raise ModelError("use_expert_bias is false: mixtures are supported that correct who is chosen")
    shape = _read_lfm2(folder, raw)
    num_dense = whole(raw, "num_dense_layers", 2)
    moe = MoeConfig(
        num_experts=whole(raw, "num_experts"),
        num_experts_per_tok=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
        sparse_layers=tuple(layer >= num_dense for layer in range(shape.num_hidden_layers)),
        naming="lfm2",
        has_correction=True,
        has_wide_router=True,
        routed_scaling_factor=number(raw, "routed_scaling_factor", 1.0),
    )
    return replace(shape, moe=moe)


def read_lfm3(folder: Path, raw: Raw) -> ModelShape:
    """LFM3: some layers attend to the latest tokens alone, with a rope of their own."""
    kinds = read_layer_types(raw, ("conv", "sliding_attention", "full_attention"), _lfm3_kind)
    is_sliding = tuple(kind == "sliding_attention" for kind in kinds)
    raw = {"head_dim": 128, "conv_L_cache": 7, "sliding_window": 256, **raw}
    ropes = ropes_by_window({"rope_parameters": _LFM3_ROPES, **raw}, is_sliding, 1e6, 1e6)
    norms, is_sandwiched = _LFM3_NORMS, bool(raw.get("use_sandwich_norm", True))
    bias = bool(raw.get("attention_bias", False))
    return replace(
        _read(folder, {**raw, "rope_parameters": None}, kinds),
        decoder_layer="gemma" if is_sandwiched else "llama",
        qkv_bias=bias,
        output_bias=bias,
        has_head_gates=bool(raw.get("use_attention_gate", True)),
        ropes=ropes,
        sliding_windows=read_windows(raw, is_sliding),
        names=DecoderNames(
            final_norm=_NAMES.final_norm, layer_norms=norms if is_sandwiched else norms[::2], mlp=_NAMES.mlp
        ),
    )


def _lfm3_kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % 4 == 0 else "conv"


def _read_lfm2(folder: Path, raw: Raw) -> ModelShape:
    attending = raw.get("full_attn_idxs")
    kinds = read_layer_types(
        raw,
        ("conv", "full_attention"),
        lambda layer: "full_attention" if attending is None or layer in attending else "conv",
    )
    return replace(_read(folder, raw, kinds), names=_NAMES)


def _read(folder: Path, raw: Raw, kinds: list[str]) -> ModelShape:
    # As it is published, and as transformers saves it.
    is_tied = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    norm_eps = raw.get("norm_eps", 1e-5)
    plain = read_plain(folder, {"rope_theta": 1e6, **raw, "tie_word_embeddings": is_tied, "rms_norm_eps": norm_eps})
    convs = ShortConvConfig(
        size=plain.hidden_size,
        conv_width=whole(raw, "conv_L_cache", 3),
        has_bias=bool(raw.get("conv_bias", False)),
        layers=tuple(kind == "conv" for kind in kinds),
    )
    return replace(plain, qk_norm="heads", state_layers=convs if any(convs.layers) else None)


def _inner_size(raw: Raw) -> int:
    """Configs give what SwiGLU's two thirds are taken of, and what these are rounded up to."""
    inner = whole_or_none(raw, "block_ff_dim") or whole_or_none(raw, "intermediate_size") or 12_288
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    inner = int(number(raw, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    multiple = whole(raw, "block_multiple_of", 256)
    return -(-inner // multiple) * multiple
