"""The `config.json` of Gemma 4's decoders, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, LayerInputsConfig, LayerSizes, ModelShape, MoeConfig
from ..other_names import NESTED_NAMES
from ..scalars import whole, whole_or_none
from .others import GEMMA_NORMS, read_gemma2, ropes_by_window
from .sliding_windows import read_windows, sliding_layers
from .text_config import decoder_fields

# As its family has them where a config leaves them out.
_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
# What it sees with, in the names of its tensors.
EYES = ("model.vision_tower.", "model.embed_vision.")
# Of a mixture: behind the MLP beside it, before the experts, and behind them.
_MIXTURE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
_INPUT_NORMS = ("post_per_layer_input_norm",)
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def read_gemma4(folder: Path, raw: Raw, prefix: str = "model") -> ModelShape:
    """A Gemma whose layers without a window have larger heads. `prefix`: of its tensors' names."""
    if raw.get("use_bidirectional_attention") == "all":
        raise ModelError("use_bidirectional_attention is 'all': a model that looks ahead cannot generate")
    raw = {**_DEFAULTS, **_without_nulls(raw)}
    ropes = raw.get("rope_parameters") or {"full_attention": _FULL_ROPE}
    is_sliding = _sliding_layers(raw)
    plain = read_gemma2(
        folder,
        {
            "final_logit_softcapping": None,
            **raw,
            "attn_logit_softcapping": None,
            "rope_parameters": None,
            # It is about images' tokens alone: see `gemma4_images`.
            "use_bidirectional_attention": None,
        },
    )
    layers, moe, inputs = _layers(raw, plain, is_sliding), _mixture(raw, len(is_sliding)), _layer_inputs(raw)
    norms = GEMMA_NORMS + (_MIXTURE_NORMS if moe is not None else ()) + (_INPUT_NORMS if inputs is not None else ())
    return replace(
        plain,
        decoder_layer="gemma4",
        attention_scale=1.0,
        norm_offset=0.0,
        qk_norm="heads",
        ropes=ropes_by_window({**raw, "rope_parameters": ropes}, is_sliding, 1e6, 1e4),
        sliding_windows=read_windows(raw, is_sliding),
        layers=layers,
        layer_inputs=inputs,
        moe=moe,
        names=DecoderNames(f"{prefix}.embed_tokens", f"{prefix}.layers", f"{prefix}.norm", layer_norms=norms),
        # Some checkpoints have them all the same.
        unread_parts=tuple(
            f"{prefix}.layers.{index}.self_attn.{part}_"
            for index, sizes in enumerate(layers)
            if sizes.kv_source is not None
            for part in "kv"
        ),
    )


def read_gemma4_text(folder: Path, raw: Raw) -> ModelShape:
    """The decoder of a Gemma 4 that takes images, audio and video too."""
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", raw["text_config"].get("tie_word_embeddings", True))}
    shape = read_gemma4(folder, {**decoder_fields(raw), **tied}, "model.language_model")
    others = ("model.audio_tower.", "model.embed_audio.")
    return replace(shape, unread_parts=(*shape.unread_parts, *EYES, *others), other_names=NESTED_NAMES)


def _layer_inputs(raw: Raw) -> LayerInputsConfig | None:
    size = whole(raw, "hidden_size_per_layer_input")
    return LayerInputsConfig(size, whole(raw, "vocab_size_per_layer_input")) if size else None


def _mixture(raw: Raw, num_layers: int) -> MoeConfig | None:
    if not raw.get("enable_moe_block"):
        return None
    return MoeConfig(
        num_experts=whole(raw, "num_experts"),
        num_experts_per_tok=whole(raw, "top_k_experts"),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        norm_topk_prob=True,
        sparse_layers=(True,) * num_layers,
        naming="gemma4",
        has_mlp_beside=True,
    )


def _without_nulls(raw: Raw) -> Raw:
    return {name: value for name, value in raw.items() if value is not None}


def _sliding_layers(raw: Raw) -> tuple[bool, ...]:
    """The last layer attends to all tokens, whatever the others do."""
    *others, _ = sliding_layers(raw, lambda layer: (layer + 1) % 6 != 0)
    return (*others, False)


def _layers(raw: Raw, plain: ModelShape, is_sliding: tuple[bool, ...]) -> tuple[LayerSizes, ...]:
    sliding = LayerSizes(plain.num_key_value_heads, plain.head_dim, plain.intermediate_size)
    has_same = bool(raw.get("attention_k_eq_v", False))
    full = replace(_full_heads(raw, sliding, is_sliding, has_same), keys_are_values=has_same)
    widened = 2 if raw.get("use_double_wide_mlp") else 1
    num_own = len(is_sliding) - whole(raw, "num_kv_shared_layers", 0)
    layers: list[LayerSizes] = []
    for index, slides in enumerate(is_sliding):
        sizes = sliding if slides else full
        if index >= num_own:
            wide = widened * sizes.intermediate_size
            sizes = replace(sizes, intermediate_size=wide, kv_source=_source(is_sliding, num_own, slides))
        layers.append(sizes)
    return tuple(layers)


def _source(is_sliding: tuple[bool, ...], num_own: int, slides: bool) -> int:
    """The last of the layers of this kind that have keys and values."""
    for index in reversed(range(num_own)):
        if is_sliding[index] is slides:
            return index
    raise ModelError(
        f"num_kv_shared_layers leaves {num_own} layers with keys and values, of which none is like one of the others"
    )


def _full_heads(raw: Raw, sliding: LayerSizes, is_sliding: tuple[bool, ...], has_same: bool) -> LayerSizes:
    """The heads of layers without a window, which transformers writes by layer, and Google for all of them."""
    if (by_layer := raw.get("per_layer_config")) is None:
        number = raw.get("num_global_key_value_heads") if has_same else None
        return _with_heads(sliding, {"head_dim": raw.get("global_head_dim", 512), "num_key_value_heads": number})
    # All its numbers have as many digits as the longest: "05".
    of_layers = {int(layer): fields for layer, fields in by_layer.items()}
    found = [_with_heads(sliding, of_layers.get(layer) or {}) for layer in range(len(is_sliding))]
    kinds = {
        slides: {each for each, of in zip(found, is_sliding, strict=True) if of is slides} for slides in (True, False)
    }
    if kinds[True] - {sliding} or len(kinds[False]) != 1:
        raise ModelError("per_layer_config has other heads than one kind for all layers without a window")
    return kinds[False].pop()


def _with_heads(sizes: LayerSizes, fields: Raw) -> LayerSizes:
    if others := sorted(set(fields) - {"head_dim", "num_key_value_heads"}):
        raise ModelError(f"per_layer_config has {', '.join(others)}; supported: head_dim, num_key_value_heads")
    return replace(
        sizes,
        head_dim=whole_or_none(fields, "head_dim") or sizes.head_dim,
        num_key_value_heads=whole_or_none(fields, "num_key_value_heads") or sizes.num_key_value_heads,
    )
