"""The `config.json` of families with Mamba-2 in some layers, or all the same in none. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..gguf.metadata import HAS_PARTS_APART
from ..model_folder import Raw
from ..model_shape import DecoderNames, FalconH1Config, MlpNames, ModelShape, MoeConfig
from ..rope_config import RopeConfig
from ..scalars import above_zero, number, number_or_none, numbers, whole, whole_or_none
from ..state_layers import Mamba2Config
from .layer_types import read_layer_types
from .llama import read_granite, read_llama, read_plain, read_rotary_dim, require_activation
from .mixtures import experts_in_each_layer, granite_naming

# As IBM's models call them, and as Nemotron does.
_IBM_NUMBERS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON_NUMBERS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
# By the names that configs have had for them.
_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
_NEMOTRON_KINDS = {**_KINDS, "mlp": "mlp", "moe": "moe"}
_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_GRANITE4_NAMES = DecoderNames(mlp=MlpNames(("input_linear",), "output_linear", "shared_mlp"))
_BAMBA_NAMES = DecoderNames(
    final_norm="model.final_layernorm",
    layer_norms=("input_layernorm", "pre_ff_layernorm"),
    mlp=MlpNames(module="feed_forward"),
)


def read_granite4(folder: Path, raw: Raw) -> ModelShape:
    """Granite 4: a Granite 3 with Mamba in most of its layers or in none, and with experts or none.

    What MLP each layer has beside its experts it calls shared.
    """
    listed = raw.get("layer_types") or raw.get("layers_block_type")
    kinds = read_layer_types({**raw, "layer_types": listed}, tuple(_KINDS), lambda layer: "mamba")
    inner = whole(raw, "shared_intermediate_size", 1024)
    granite = read_granite(folder, {**raw, "intermediate_size": inner, "mlp_bias": False})
    layers = tuple(_KINDS[kind] == "mamba" for kind in kinds)
    ropes = granite.ropes
    if raw.get("position_embedding_type") != "rope":
        ropes = tuple(RopeConfig(rope.theta, "none") for rope in ropes)
    return replace(
        granite,
        ropes=ropes,
        names=DecoderNames() if raw.get(HAS_PARTS_APART) else _GRANITE4_NAMES,
        state_layers=_read_ibm_mamba(raw, granite, layers) if any(layers) else None,
        moe=_read_granite4_moe(raw, granite) if whole(raw, "num_local_experts", 8) else None,
    )


def _read_granite4_moe(raw: Raw, granite: ModelShape) -> MoeConfig:
    num_experts, num_chosen = whole(raw, "num_local_experts", 8), whole(raw, "num_experts_per_tok", 2)
    moe = experts_in_each_layer(granite, granite_naming(raw, "granite4"), num_experts, num_chosen)
    return replace(
        moe,
        intermediate_size=whole(raw, "intermediate_size", 11008),
        shared_expert_intermediate_size=granite.intermediate_size,
        has_shared_gate=False,
    )


def read_bamba(folder: Path, raw: Raw) -> ModelShape:
    """Bamba: a Llama of whose heads' numbers half are rotated."""
    plain = read_llama(folder, {"rms_norm_eps": 1e-5, **raw})
    attends = set(raw.get("attn_layer_indices") or ())
    layers = tuple(index not in attends for index in range(plain.num_hidden_layers))
    return replace(
        plain,
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.5),
        names=_BAMBA_NAMES,
        state_layers=_read_ibm_mamba(raw, plain, layers) if any(layers) else None,
    )


def read_falcon_h1(folder: Path, raw: Raw) -> ModelShape:
    """Falcon-H1: each layer attends and has Mamba, side by side, and each of their parts is scaled."""
    for field in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        if raw.get(field):
            raise ModelError(f"{field} is set: Falcon-H1 is supported without biases but the convolution's")
    plain = read_llama(folder, {"rms_norm_eps": 1e-5, **raw})
    gates, mlp = _scales(raw, "mlp_multipliers", 2)
    into_attention = number(raw, "attention_in_multiplier", 1.0)
    return replace(
        plain,
        decoder_layer="falcon_h1",
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        logits_scaling=1 / above_zero(raw, "lm_head_multiplier", 1.0),
        # What scales the input scales queries, keys and values.
        attention_scale=plain.attention_scale * into_attention**2,
        key_scale=number(raw, "key_multiplier", 1.0),
        gate_scale=gates,
        falcon_h1=FalconH1Config(
            attention_out_scale=into_attention * number(raw, "attention_out_multiplier", 1.0),
            state_out_scale=number(raw, "ssm_out_multiplier", 1.0),
            mlp_out_scale=mlp,
        ),
        names=_BAMBA_NAMES,
        state_layers=_read_falcon_mamba(raw, plain),
    )


def _read_falcon_mamba(raw: Raw, plain: ModelShape) -> Mamba2Config:
    has_norm = bool(raw.get("mamba_rms_norm", False))
    if has_norm and raw.get("mamba_norm_before_gate", True):
        raise ModelError("mamba_norm_before_gate is true, or left out: supported are models that norm what is gated")
    mamba = _read_ibm_mamba({"mamba_d_ssm": 1024, **raw}, plain, (True,) * plain.num_hidden_layers)
    into = number(raw, "ssm_in_multiplier", 1.0)
    scales = tuple(into * scale for scale in _scales(raw, "ssm_multipliers", 5))
    return replace(mamba, has_norm=has_norm, input_scales=scales if set(scales) != {1.0} else None)


def _scales(raw: Raw, name: str, num_scales: int) -> tuple[float, ...]:
    found = numbers(raw, name) if raw.get(name) is not None else (1.0,) * num_scales
    if len(found) != num_scales:
        raise ModelError(f"{name} has {len(found)} entries, and must have {num_scales}")
    return found


def _read_ibm_mamba(raw: Raw, plain: ModelShape, layers: tuple[bool, ...]) -> Mamba2Config:
    num_heads = whole(raw, "mamba_n_heads", 128)
    # Falcon-H1's need not be a multiple of the hidden size.
    inner = whole_or_none(raw, "mamba_d_ssm") or whole(raw, "mamba_expand", 2) * plain.hidden_size
    head_dim = inner // num_heads if raw.get("mamba_d_head") in ("auto", None) else whole(raw, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise ModelError(
            f"mamba_n_heads {num_heads} of mamba_d_head {head_dim} are not the {inner} numbers that mamba_d_ssm or "
            "mamba_expand says"
        )
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=whole(raw, "mamba_n_groups", 1),
        state_dim=whole(raw, "mamba_d_state", 256),
        conv_width=whole(raw, "mamba_d_conv", 4),
        has_conv_bias=bool(raw.get("mamba_conv_bias", True)),
        has_bias=bool(raw.get("mamba_proj_bias", False)),
        dt_limits=_dt_limits(raw),
        number_names=_IBM_NUMBERS,
        layers=layers,
    )


def read_nemotron_h(folder: Path, raw: Raw) -> ModelShape:
    """Nemotron-H and Nemotron 3: each layer is Mamba, attention, an MLP or a mixture, and nothing else."""
    require_activation(raw, "mlp_hidden_act", "relu2")
    require_activation(raw, "mamba_hidden_act", "silu")
    listed = raw.get("layers_block_type") or raw.get("layer_types")
    kinds = (
        _known(listed, _NEMOTRON_KINDS) if listed else _known(str(raw["hybrid_override_pattern"]), _NEMOTRON_LETTERS)
    )
    eps = number_or_none(raw, "layer_norm_epsilon") or number_or_none(raw, "rms_norm_eps") or 1e-5
    plain = read_plain(folder, {"head_dim": 128, **raw, "num_hidden_layers": len(kinds), "rms_norm_eps": eps})
    attention_bias = bool(raw.get("attention_bias", False))
    if raw.get("mlp_bias") and "moe" in kinds:
        raise ModelError("mlp_bias is set: Nemotron's mixtures are supported without")
    return replace(
        plain,
        decoder_layer="nemotron_h",
        ropes=(RopeConfig(1.0, "none"),) * len(kinds),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        activation="relu2",
        is_gated=False,
        names=DecoderNames(
            embedding="backbone.embeddings",
            layers="backbone.layers",
            final_norm="backbone.norm_f",
            layer_norms=("norm",),
            attention="mixer",
            mlp=MlpNames(("up_proj",), module="mixer"),
        ),
        state_layers=_read_nemotron_mamba(raw, kinds) if "mamba" in kinds else None,
        feed_forward_layers=tuple(kind in ("mlp", "moe") for kind in kinds),
        moe=_read_nemotron_moe(raw, kinds) if "moe" in kinds else None,
        # They guess tokens ahead.
        unread_parts=("mtp.",),
    )


def _read_nemotron_mamba(raw: Raw, kinds: list[str]) -> Mamba2Config:
    return Mamba2Config(
        num_heads=whole(raw, "mamba_num_heads", 128),
        head_dim=whole(raw, "mamba_head_dim", 64),
        num_groups=whole(raw, "n_groups", 8),
        state_dim=whole(raw, "ssm_state_size", 128),
        conv_width=whole(raw, "conv_kernel", 4),
        has_conv_bias=bool(raw.get("use_conv_bias", True)),
        has_bias=bool(raw.get("use_bias", False)),
        dt_limits=_dt_limits(raw),
        number_names=_NEMOTRON_NUMBERS,
        layers=tuple(kind == "mamba" for kind in kinds),
        module="mixer",
    )


def _read_nemotron_moe(raw: Raw, kinds: list[str]) -> MoeConfig:
    return MoeConfig(
        num_experts=whole(raw, "n_routed_experts", 8),
        num_experts_per_tok=whole(raw, "num_experts_per_tok", 2),
        intermediate_size=whole(raw, "moe_intermediate_size", 7688),
        norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
        sparse_layers=tuple(kind == "moe" for kind in kinds),
        naming="nemotron_h",
        shared_expert_intermediate_size=whole(raw, "moe_shared_expert_intermediate_size", 7688),
        has_shared_gate=False,
        has_correction=True,
        routed_scaling_factor=number(raw, "routed_scaling_factor", 1.0),
        num_groups=whole_or_none(raw, "n_group") or 1,
        num_chosen_groups=whole_or_none(raw, "topk_group") or 1,
        has_wide_router=True,
        latent_size=whole_or_none(raw, "moe_latent_size") or None,
    )


def _dt_limits(raw: Raw) -> tuple[float, float]:
    # Infinity is no JSON: transformers 5 writes it as an object.
    least, most = (
        float(limit["__float__"] if isinstance(limit, dict) else limit)
        for limit in raw.get("time_step_limit") or (0.0, float("inf"))
    )
    return least, most


def _known(kinds: Iterable[object], names: dict[str, str]) -> list[str]:
    found = [str(kind) for kind in kinds]
    if others := sorted(set(found) - set(names)):
        raise ModelError(f"layers are of the kinds {', '.join(others)}; supported: {', '.join(names)}")
    return [names[kind] for kind in found]
