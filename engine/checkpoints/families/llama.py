"""The `config.json` of the families whose layer is Llama's, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, MlpNames, ModelShape, QueryGrowth
from ..rope_config import RopeConfig, read_rope, rope_fields, rope_place
from ..scalars import number, number_or_none, numbers, positive, require, whole, whole_or_none, wholes
from .sliding_windows import qwen_windows, read_windows, sliding_layers

# What a checkpoint calls the parts where there is no gate.
WITHOUT_GATE = DecoderNames(mlp=MlpNames(("up_proj",)))
# And where gate and up are one matrix.
FUSED_GATE_UP = DecoderNames(mlp=MlpNames(("gate_up_proj",)))


def read_plain(folder: Path, raw: Raw, rms_norm_eps: float = 1e-6, rope_theta: float = 10000.0) -> ModelShape:
    """What all families read the same way: a Llama without biases. The defaults are for fields left out."""
    # What other numbers are divided by, and layers, of which readers take the first.
    heads, num_layers = (positive(raw, name) for name in ("num_attention_heads", "num_hidden_layers"))
    head_dim = positive({"head_dim": whole_or_none(raw, "head_dim") or whole(raw, "hidden_size") // heads}, "head_dim")
    rope = read_rope(rope_fields(raw), number_or_none(raw, "rope_theta") or rope_theta, raw)
    return ModelShape(
        path=folder,
        decoder_layer="llama",
        vocab_size=whole(raw, "vocab_size"),
        hidden_size=whole(raw, "hidden_size"),
        intermediate_size=whole(raw, "intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=whole_or_none(raw, "num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", rms_norm_eps),
        max_position_embeddings=context_length(raw, rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        rotary_dim=head_dim,
        eos_token_ids=wholes(raw, "eos_token_id"),
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
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logits_scaling=number(raw, "logits_scaling", 1.0),
    )


def read_granite_swa(folder: Path, raw: Raw) -> ModelShape:
    """Granite with sinks and windows, whose layers rotate each in its own way, or not at all."""
    granite = read_granite(folder, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, **raw})
    thetas = numbers(raw, "layer_rope_theta") if raw.get("layer_rope_theta") else [rope.theta for rope in granite.ropes]
    if len(thetas) != len(granite.ropes):
        raise ModelError(f"layer_rope_theta has {len(thetas)} entries for {len(granite.ropes)} layers")
    turns = zip(granite.ropes, thetas, strict=True)
    return replace(
        granite,
        has_sinks=True,
        ropes=tuple(replace(rope, theta=theta) if theta else RopeConfig(rope.theta, "none") for rope, theta in turns),
        sliding_windows=read_windows({"sliding_window": 128, **raw}, sliding_layers(raw, lambda layer: layer % 4 != 0)),
    )


def read_smollm3(folder: Path, raw: Raw) -> ModelShape:
    """A Llama with layers that know no positions."""
    plain = read_llama(folder, {"rope_theta": 2e6, "tie_word_embeddings": True, **raw})
    interval = whole(raw, "no_rope_layer_interval", 4)
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


def read_seed_oss(folder: Path, raw: Raw) -> ModelShape:
    """Seed-OSS: a Llama that says of each bias by itself whether it is there."""
    require_activation(raw, "hidden_act", "silu")
    return replace(
        read_plain(folder, {"head_dim": 128, **raw}),
        qkv_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def read_internlm3(folder: Path, raw: Raw) -> ModelShape:
    """A Llama, with names of its own for its biases as it is published, and Llama's as transformers saves it."""
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("bias", raw.get("mlp_bias", False)))
    return replace(
        read_plain(folder, {"head_dim": 128, **raw}, rms_norm_eps=1e-5),
        qkv_bias=bool(raw.get("qkv_bias", raw.get("attention_bias", False))),
        output_bias=bias,
        mlp_bias=bias,
    )


def read_arcee(folder: Path, raw: Raw) -> ModelShape:
    """AFM: a Llama whose MLP has no gate."""
    require_activation(raw, "hidden_act", "relu2")
    plain = read_llama(folder, {"rms_norm_eps": 1e-5, **raw, "hidden_act": "silu"})
    return replace(plain, activation="relu2", is_gated=False, names=WITHOUT_GATE)


def read_mistral(folder: Path, raw: Raw, **defaults: float) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    windows = read_windows(raw, sliding_layers(raw, lambda layer: True))
    return replace(read_plain(folder, raw, **defaults), sliding_windows=windows)


def read_ministral3(folder: Path, raw: Raw) -> ModelShape:
    """A Mistral whose queries grow beyond the context that it was first trained for."""
    plain = read_mistral(folder, raw, rms_norm_eps=1e-5, rope_theta=1e6)
    return replace(plain, query_growth=read_query_growth(raw, plain.ropes[0]))


def read_query_growth(raw: Raw, rope: RopeConfig) -> QueryGrowth | None:
    """How queries grow beyond the context that the model was first trained for, which `rope` knows."""
    beta = number_or_none(raw.get("rope_parameters") or {}, "llama_4_scaling_beta", within=rope_place(raw))
    return QueryGrowth(beta, rope.original_max_position_embeddings) if beta else None


def read_qwen2(folder: Path, raw: Raw) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    first = whole(raw, "max_window_layers", 28)
    windows = qwen_windows(raw, lambda layer: layer >= first)
    return replace(read_plain(folder, raw), qkv_bias=True, sliding_windows=windows)


def read_qwen3(folder: Path, raw: Raw) -> ModelShape:
    bias = bool(raw.get("attention_bias", False))
    return replace(read_qwen2(folder, raw), qkv_bias=bias, output_bias=bias, qk_norm="heads")


def read_apertus(folder: Path, raw: Raw) -> ModelShape:
    """Apertus: a Llama with norms of heads, and an MLP without a gate whose activation is learnt."""
    require_activation(raw, "hidden_act", "xielu")
    for field, expected in (("qk_norm", True), ("post_norm", False)):
        if bool(raw.get(field, expected)) != expected:
            raise ModelError(f"{field} is {raw[field]}; supported for Apertus: {expected}")
    stretched = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    defaults = {
        "rope_theta": 1.2e7,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**stretched, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
    return replace(
        read_llama(folder, {**defaults, **raw, "hidden_act": "silu"}),
        qk_norm="heads",
        activation="xielu",
        is_gated=False,
        names=replace(WITHOUT_GATE, layer_norms=("attention_layernorm", "feedforward_layernorm")),
    )


def read_hunyuan(folder: Path, raw: Raw) -> ModelShape:
    """Hunyuan's dense ones: a Llama with norms of each head once it is rotated."""
    if not raw.get("use_qk_norm", True):
        raise ModelError("use_qk_norm is false: supported are models whose queries and keys have norms")
    if raw.get("use_cla"):
        raise ModelError("use_cla is set: layers that share keys and values are not supported")
    plain = read_llama(folder, {"rms_norm_eps": 1e-5, **raw})
    if alpha := number_or_none(rope_fields(raw), "alpha", within=rope_place(raw)) or 0:
        # Said to be dynamic, and the same for all lengths (NTK-aware scaling).
        theta = plain.ropes[0].theta * alpha ** (plain.head_dim / (plain.head_dim - 2))
        plain = replace(plain, ropes=(RopeConfig(theta),) * plain.num_hidden_layers)
    names = DecoderNames(query_norm="query_layernorm", key_norm="key_layernorm")
    return replace(plain, mlp_bias=False, qk_norm="rotated", names=names)


def read_phi3(folder: Path, raw: Raw) -> ModelShape:
    config = read_mistral(folder, raw, rms_norm_eps=1e-5)
    return replace(
        config, has_fused_qkv=True, rotary_dim=read_rotary_dim(raw, config.head_dim, 1.0), names=FUSED_GATE_UP
    )


def read_rotary_dim(raw: Raw, head_dim: int, share: float) -> int:
    """How many of a head's dimensions are rotated; `share`: of them, where the config says nothing."""
    # Beside the rope's own fields (transformers 5) or the model's (before).
    name = "partial_rotary_factor"
    of_rope = number_or_none(raw.get("rope_parameters") or {}, name, within=rope_place(raw))
    return int(head_dim * (of_rope or number_or_none(raw, name) or share))


def require_activation(raw: Raw, field: str, expected: str) -> None:
    require(raw, field, expected, *(["swish"] if expected == "silu" else []))


def context_length(raw: Raw, rope: RopeConfig) -> int:
    """How many positions the model knows. A config stretched by YaRN may still give the number before that."""
    own = whole(raw, "max_position_embeddings")
    if rope.rope_type != "yarn":
        return own
    return max(own, int(rope.original_max_position_embeddings * rope.factor))
