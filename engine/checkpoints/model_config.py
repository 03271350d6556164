"""What a model is: its `config.json`, with the families' differences resolved into plain fields. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelError
from .model_folder import Raw, config_file, read_config, read_stop_ids
from .quantization_config import QuantizationConfig, read_quantization
from .rope_config import RopeConfig, read_rope
from .sliding_windows import qwen_windows, read_windows, sliding_layers
from .stage import WHOLE_MODEL, Stage
from .vision_config import VisionConfig, decoder_fields, read_mrope_section, read_vision


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token's MLP is the `num_experts_per_tok` that a router chooses.

    `norm_topk_prob`: the chosen experts' shares sum to one. `shared_expert_intermediate_size`: one more expert that
    every token has. `sparse_layers`: one entry a layer, false where it has an ordinary MLP. `naming`: whose names the
    checkpoint's tensors have.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    naming: Literal["mixtral", "qwen"]
    shared_expert_intermediate_size: int | None = None


@dataclass(frozen=True)
class FalconConfig:
    """How a Falcon's layer is built: `is_parallel` where attention and MLP have the same input, not one the other's.

    `attention_norm`, `mlp_norm`: what a checkpoint calls the norms; None: the MLP has attention's.
    """

    is_parallel: bool
    attention_norm: str
    mlp_norm: str | None


@dataclass(frozen=True)
class DecoderNames:
    """What a checkpoint calls the parts of a decoder."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape.

    `decoder_layer` says how a layer's norms stand, as the families do that had it first; the fields from `qkv_bias`
    on are what families add to a plain Llama.
    """

    path: Path
    decoder_layer: Literal["llama", "gemma", "falcon"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    # What attention scores are multiplied by.
    attention_scale: float
    # One entry a layer: how its positions are rotated, and how many of the latest tokens it attends to (None: all).
    ropes: tuple[RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    # How many of each head's dimensions are rotated; the others carry no position.
    rotary_dim: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    # The checkpoint has q, k, v as one matrix, and gate and up as another.
    has_fused_projections: bool = False
    # A score or logit x becomes cap · tanh(x / cap).
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    # What is added to the weights of norms.
    norm_offset: float = 0.0
    moe: MoeConfig | None = None
    falcon: FalconConfig | None = None
    names: DecoderNames = DecoderNames()
    # Of a model that reads images: its eyes, and which of a head's frequencies turn by time, by height, by width.
    vision: VisionConfig | None = None
    mrope_section: tuple[int, int, int] | None = None
    # Which of the checkpoint's weights are quantised, and how.
    quantization: QuantizationConfig | None = None
    # Which of the layers these are, where other processes have the others.
    stage: Stage = WHOLE_MODEL

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` (and the stop ids of `generation_config.json`) of a model folder, or a GGUF file's.

        Raises `ModelError` when the folder is no model, the architecture is not one of
        `SUPPORTED_ARCHITECTURES`, the weights are quantised in a way that cannot be read, or a needed field is
        missing.
        """
        folder = Path(path)
        raw = read_config(folder)
        read = _READERS[_architecture(folder, raw)]
        raw["eos_token_id"] = read_stop_ids(folder, raw)
        try:
            quantization = read_quantization(raw)
            config = replace(_without_idle_windows(read(folder, raw)), quantization=quantization)
            _check(config)
        except ModelError as error:
            raise ModelError(f"{config_file(folder)}: {error}") from error
        except KeyError as missing:
            raise ModelError(f"{config_file(folder)} has no field {missing}") from missing
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"{config_file(folder)} has a field of the wrong kind: {error}") from error
        return config


def _architecture(folder: Path, raw: Raw) -> str:
    """Which of the readers fits. Refuses what none of them could make sense of."""
    names = raw.get("architectures") or []
    name = next((str(name) for name in names if name in _READERS), None)
    if name is None:
        found = ", ".join(map(str, names)) or raw.get("model_type") or "none named"
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"unsupported architecture {found} in {folder}; supported: {supported}")
    return name


def _plain(folder: Path, raw: Raw, rms_norm_eps: float = 1e-6, rope_theta: float = 10000.0) -> ModelConfig:
    """What all families read the same way: a Llama without biases. The defaults are for fields left out."""
    heads, num_layers = int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    # Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = read_rope(scaling, float(raw.get("rope_theta") or rope_theta), raw)
    return ModelConfig(
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
        max_position_embeddings=_context(raw, rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        rotary_dim=head_dim,
        eos_token_ids=tuple(map(int, raw["eos_token_id"])),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _llama(folder: Path, raw: Raw) -> ModelConfig:
    _require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("attention_bias", False))
    plain = _plain(folder, raw)
    return replace(plain, qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(folder: Path, raw: Raw, **defaults: float) -> ModelConfig:
    _require_activation(raw, "hidden_act", "silu")
    windows = read_windows(raw, sliding_layers(raw, lambda layer: True))
    return replace(_plain(folder, raw, **defaults), sliding_windows=windows)


def _qwen2(folder: Path, raw: Raw) -> ModelConfig:
    _require_activation(raw, "hidden_act", "silu")
    first = int(raw.get("max_window_layers", 28))
    windows = qwen_windows(raw, lambda layer: layer >= first)
    return replace(_plain(folder, raw), qkv_bias=True, sliding_windows=windows)


def _qwen2_5_vl(folder: Path, raw: Raw) -> ModelConfig:
    """Qwen2 with a vision tower in front."""
    plain = _qwen2(folder, decoder_fields(raw))
    seeing = replace(plain, vision=read_vision(folder, raw), mrope_section=read_mrope_section(raw, plain.rotary_dim))
    if seeing.vision is not None and seeing.vision.out_hidden_size != plain.hidden_size:
        size = seeing.vision.out_hidden_size
        raise ModelError(f"vision_config.out_hidden_size {size} is not hidden_size {plain.hidden_size}")
    return seeing


def _qwen3(folder: Path, raw: Raw) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return replace(_qwen2(folder, raw), qkv_bias=bias, output_bias=bias, qk_norm=True)


def _mixtral(folder: Path, raw: Raw) -> ModelConfig:
    plain = _mistral(folder, raw, rms_norm_eps=1e-5, rope_theta=1e6)
    moe = MoeConfig(
        num_experts=int(raw["num_local_experts"]),
        num_experts_per_tok=int(raw["num_experts_per_tok"]),
        intermediate_size=plain.intermediate_size,
        norm_topk_prob=True,
        sparse_layers=(True,) * plain.num_hidden_layers,
        naming="mixtral",
    )
    return replace(plain, moe=moe)


def _qwen2_moe(folder: Path, raw: Raw) -> ModelConfig:
    last = int(raw.get("max_window_layers", 28))
    return replace(
        _qwen2(folder, raw),
        qkv_bias=bool(raw.get("qkv_bias", True)),
        sliding_windows=qwen_windows(raw, lambda layer: layer % 2 == 0 and layer < last),
        moe=replace(_qwen_moe(raw), shared_expert_intermediate_size=int(raw["shared_expert_intermediate_size"])),
    )


def _qwen3_moe(folder: Path, raw: Raw) -> ModelConfig:
    windows = qwen_windows(raw, lambda layer: True)
    return replace(_qwen3(folder, raw), sliding_windows=windows, moe=_qwen_moe(raw))


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


def _phi3(folder: Path, raw: Raw) -> ModelConfig:
    config = _mistral(folder, raw, rms_norm_eps=1e-5)
    scaling = raw.get("rope_parameters") or {}
    share = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    return replace(config, has_fused_projections=True, rotary_dim=int(config.head_dim * share))


def _gemma2(folder: Path, raw: Raw) -> ModelConfig:
    _require_activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention is set: a model that looks ahead cannot generate")
    # The head's size does not follow from the others here.
    raw = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, **raw}
    bias = bool(raw.get("attention_bias", False))
    return replace(
        _plain(folder, raw),
        decoder_layer="gemma",
        qkv_bias=bias,
        output_bias=bias,
        activation="gelu_tanh",
        attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_soft_cap=_optional_float(raw.get("attn_logit_softcapping", 50.0)),
        final_soft_cap=_optional_float(raw.get("final_logit_softcapping", 30.0)),
        embedding_scale=int(raw["hidden_size"]) ** 0.5,
        norm_offset=1.0,
        sliding_windows=read_windows(raw, sliding_layers(raw, lambda layer: layer % 2 == 0)),
    )


def _gemma3(folder: Path, raw: Raw) -> ModelConfig:
    """As Gemma 2, with norms on q and k instead of caps, and a rope of their own for the layers with a window."""
    ropes = raw.get("rope_parameters") or {}
    scaling = ropes.get("full_attention") or raw.get("rope_scaling") or {}
    full = read_rope(scaling, float(raw.get("rope_theta") or 1e6), raw)
    local = read_rope(ropes.get("sliding_attention") or {}, float(raw.get("rope_local_base_freq") or 1e4), raw)
    pattern = int(raw.get("sliding_window_pattern", 6))
    is_sliding = sliding_layers(raw, lambda layer: (layer + 1) % pattern != 0)
    raw = {"sliding_window": 4096, "attn_logit_softcapping": None, "final_logit_softcapping": None, **raw}
    return replace(
        _gemma2(folder, {**raw, "rope_parameters": None}),
        qk_norm=True,
        ropes=tuple(local if sliding else full for sliding in is_sliding),
        sliding_windows=read_windows(raw, is_sliding),
    )


def _falcon(folder: Path, raw: Raw) -> ModelConfig:
    """Of the first architecture (1B, 7B) and the new one (11B, 40B, 180B), which has groups of heads."""
    if raw.get("alibi"):
        raise ModelError("alibi is set: positions as ALiBi biases are not supported, use a Falcon with rotary ones")
    if raw.get("quantization_config"):
        raise ModelError("quantization_config is set: quantised Falcon models are not supported, use the plain ones")
    _require_activation(raw, "activation", "gelu")
    hidden_size, heads, bias = int(raw["hidden_size"]), int(raw["num_attention_heads"]), bool(raw.get("bias", False))
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
        _plain(folder, filled | raw),
        decoder_layer="falcon",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        has_fused_projections=True,
        falcon=_falcon_layer(raw, is_new),
        names=DecoderNames("transformer.word_embeddings", "transformer.h", "transformer.ln_f"),
    )


def _falcon_layer(raw: Raw, is_new: bool) -> FalconConfig:
    num_norms = raw.get("num_ln_in_parallel_attn") or 2
    if is_new and num_norms == 2:
        return FalconConfig(True, "ln_attn", "ln_mlp")
    is_parallel = is_new or bool(raw.get("parallel_attn", True))
    return FalconConfig(is_parallel, "input_layernorm", None if is_parallel else "post_attention_layernorm")


_READERS: dict[str, Callable[[Path, Raw], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "FalconForCausalLM": _falcon,
}
SUPPORTED_ARCHITECTURES = tuple(_READERS)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def _without_idle_windows(config: ModelConfig) -> ModelConfig:
    """Windows as wide as the context, as some configs have them, hide nothing; without them prefixes are shared."""
    context = config.max_position_embeddings
    windows = tuple(window if window and window < context else None for window in config.sliding_windows)
    return replace(config, sliding_windows=windows)


def _check(config: ModelConfig) -> None:
    """Refuse numbers that cannot be, or contradict each other."""
    for name in _SIZES:
        if (size := getattr(config, name)) < 1:
            raise ModelError(f"{name} must be at least 1, not {size}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"num_attention_heads {config.num_attention_heads} is no multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    if config.moe is not None and config.moe.num_experts_per_tok > config.moe.num_experts:
        raise ModelError(f"num_experts_per_tok is {config.moe.num_experts_per_tok} of {config.moe.num_experts} experts")
    for rope in config.ropes:
        lengths, expected = (len(rope.short_factor), len(rope.long_factor)), config.rotary_dim // 2
        if rope.rope_type == "longrope" and lengths != (expected, expected):
            raise ModelError(
                f"short_factor and long_factor have {lengths[0]} and {lengths[1]} entries where there are {expected} "
                "frequencies"
            )


def _require_activation(raw: Raw, field: str, expected: str) -> None:
    aliases = {expected, "swish"} if expected == "silu" else {expected}
    if (found := raw.get(field, expected)) not in aliases:
        raise ModelError(f"unsupported {field} {found!r}; supported: {expected}")


def _context(raw: Raw, rope: RopeConfig) -> int:
    """How many positions the model knows. A config stretched by YaRN may still give the number before that."""
    own = int(raw["max_position_embeddings"])
    if rope.rope_type != "yarn":
        return own
    return max(own, int(rope.original_max_position_embeddings * rope.factor))


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
