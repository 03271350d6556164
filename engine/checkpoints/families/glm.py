"""The `config.json` of GLM and ERNIE, and of mixtures whose experts are chosen as GLM's. Free of torch.

Each reader raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, ModelShape, MoeConfig
from ..scalars import number, whole, whole_or_none
from .llama import FUSED_GATE_UP, read_llama, read_plain, read_qwen3, read_rotary_dim, require_activation
from .others import read_exaone4
from .sliding_windows import read_windows, sliding_layers
from .sparse_layers import with_listed_layers


def read_glm(folder: Path, raw: Raw) -> ModelShape:
    """GLM-4 of 2024: a Llama of which half of each head is rotated, neighbours against each other."""
    require_activation(raw, "hidden_act", "silu")
    plain = read_plain(folder, {"head_dim": 128, **raw}, rms_norm_eps=1.5625e-7)
    return replace(
        plain,
        qkv_bias=bool(raw.get("attention_bias", True)),
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.5),
        has_rotary_pairs=True,
        names=FUSED_GATE_UP,
    )


def read_glm4(folder: Path, raw: Raw) -> ModelShape:
    """GLM-4 of 2025: the same with norms after attention and MLP too."""
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    plain = read_glm(folder, raw)
    return replace(plain, decoder_layer="gemma", names=replace(plain.names, layer_norms=norms))


def read_ernie(folder: Path, raw: Raw) -> ModelShape:
    """ERNIE 4.5: a Llama whose rotary positions are GLM's."""
    require_activation(raw, "hidden_act", "silu")
    bias = bool(raw.get("use_bias", False))
    raw = {"head_dim": 128, "tie_word_embeddings": True, **raw}
    return replace(
        read_plain(folder, raw, rms_norm_eps=1e-5, rope_theta=5e5),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        has_rotary_pairs=True,
    )


def read_ernie_moe(folder: Path, raw: Raw) -> ModelShape:
    """ERNIE 4.5's mixtures: experts that probabilities choose, with what corrects these."""
    if raw.get("use_bias"):
        raise ModelError("use_bias is set: ERNIE's mixtures are supported without biases")
    # A head's size follows from the others here.
    plain = read_ernie(folder, {"head_dim": None, **raw})
    inner, last = whole(raw, "moe_intermediate_size"), whole(raw, "moe_layer_end_index", -1)
    first, step = whole(raw, "moe_layer_start_index", 1), whole(raw, "moe_layer_interval", 1)
    layers = range(plain.num_hidden_layers)
    end = len(layers) if last == -1 else last + 1
    moe = MoeConfig(
        num_experts=whole(raw, "moe_num_experts"),
        num_experts_per_tok=whole(raw, "moe_k"),
        intermediate_size=inner,
        norm_topk_prob=True,
        sparse_layers=tuple(first <= layer < end and (layer + 1) % step == 0 for layer in layers),
        naming="ernie",
        shared_expert_intermediate_size=whole(raw, "moe_num_shared_experts", 2) * inner or None,
        has_shared_gate=False,
        has_correction=True,
        are_sigmoids=False,
        has_wide_router=True,
    )
    # Further parts guess further tokens, which is not supported.
    return replace(plain, moe=moe, unread_parts=("model.mtp_",))


def read_minimax_m2(folder: Path, raw: Raw) -> ModelShape:
    """MiniMax M2: a Llama with norms over all heads, of which a part is rotated, and experts chosen as GLM's."""
    require_activation(raw, "hidden_act", "silu")
    for field, expected in (("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("shared_intermediate_size", 0)):
        if (found := raw.get(field, expected)) != expected:
            raise ModelError(f"{field} is {found!r}; supported for MiniMax M2: {expected!r}")
    if 0 in (raw.get("attn_type_list") or ()):
        raise ModelError("attn_type_list has 0: linear attention is not supported")
    plain = read_plain(folder, {"head_dim": 128, **raw}, rope_theta=5e6)
    rotary_dim = whole_or_none(raw, "rotary_dim") or read_rotary_dim(raw, plain.head_dim, 1.0)
    experts = {**raw, "moe_intermediate_size": plain.intermediate_size, "n_shared_experts": 0}
    return replace(
        plain,
        qk_norm="all",
        rotary_dim=rotary_dim,
        moe=replace(read_experts(experts, first_dense=0, normalises=True), naming="minimax"),
        unread_parts=guessing_parts(raw, plain.num_hidden_layers),
    )


def read_glm4_moe(folder: Path, raw: Raw) -> ModelShape:
    """GLM-4.5 and later: a Llama of which half of each head is rotated, with experts that sigmoids choose."""
    require_activation(raw, "hidden_act", "silu")
    plain = read_plain(folder, raw, rms_norm_eps=1e-5)
    return replace(
        plain,
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm="heads" if raw.get("use_qk_norm") else None,
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.5),
        moe=read_experts(raw, first_dense=1, normalises=True),
        # Further layers guess further tokens, which is not supported.
        unread_parts=guessing_parts(raw, plain.num_hidden_layers),
    )


def read_solar_open(folder: Path, raw: Raw) -> ModelShape:
    """Solar Open: GLM-4.5 with experts in each layer, whose heads are rotated whole."""
    require_activation(raw, "hidden_act", "silu")
    plain = read_plain(
        folder,
        {"head_dim": 128, "intermediate_size": raw["moe_intermediate_size"], **raw},
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    )
    return replace(
        plain,
        qkv_bias=bool(raw.get("attention_bias", False)),
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 1.0),
        moe=read_experts({**raw, "first_k_dense_replace": 0}, first_dense=0, normalises=True),
    )


def read_dots1(folder: Path, raw: Raw) -> ModelShape:
    """dots.llm1: a Qwen3 with such experts."""
    last = whole(raw, "max_window_layers", 62)
    windows = read_windows({"sliding_window": 4096, **raw}, sliding_layers(raw, lambda layer: layer >= last))
    return replace(
        read_qwen3(folder, raw), sliding_windows=windows, moe=read_experts(raw, first_dense=0, normalises=False)
    )


def read_hy3(folder: Path, raw: Raw) -> ModelShape:
    """Hy3: a Llama with norms of heads, and such experts."""
    if raw.get("mlp_bias"):
        raise ModelError("mlp_bias is set: Hy3 is supported without")
    plain = read_llama(folder, {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, **raw})
    experts = {
        **raw,
        "n_routed_experts": raw["num_experts"],
        "n_shared_experts": raw.get("num_shared_experts", 1),
        "routed_scaling_factor": raw.get("router_scaling_factor", 2.826),
        "norm_topk_prob": True,
    }
    moe = replace(read_experts(experts, first_dense=1, normalises=True), naming="hy3")
    return replace(
        plain,
        qk_norm="heads",
        moe=with_listed_layers(moe, raw),
        unread_parts=guessing_parts(raw, plain.num_hidden_layers),
    )


def read_exaone_moe(folder: Path, raw: Raw) -> ModelShape:
    """K-EXAONE: EXAONE 4's attention in Llama's layer, and such experts."""
    require_activation(raw, "hidden_act", "silu")
    experts = {
        "routed_scaling_factor": 2.5,
        **raw,
        "n_routed_experts": raw["num_experts"],
        "n_shared_experts": raw.get("num_shared_experts", 1),
    }
    moe = replace(read_experts(experts, first_dense=1, normalises=True), naming="exaone")
    return replace(
        read_exaone4(folder, raw),
        decoder_layer="llama",
        names=DecoderNames(),
        moe=with_listed_layers(moe, raw),
        # Further parts guess further tokens, which is not supported.
        unread_parts=("mtp.",),
    )


def read_experts(raw: Raw, first_dense: int, normalises: bool) -> MoeConfig:
    """As DeepSeek-V3 has it. The defaults are for fields left out."""
    inner, num_shared = whole(raw, "moe_intermediate_size"), whole_or_none(raw, "n_shared_experts") or 0
    first_dense, step = whole(raw, "first_k_dense_replace", first_dense), whole_or_none(raw, "moe_layer_freq") or 1
    return MoeConfig(
        num_experts=whole_or_none(raw, "n_routed_experts") or whole(raw, "num_local_experts"),
        num_experts_per_tok=whole(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        norm_topk_prob=bool(raw.get("norm_topk_prob", normalises)),
        sparse_layers=tuple(
            layer >= first_dense and layer % step == 0 for layer in range(whole(raw, "num_hidden_layers"))
        ),
        naming="glm",
        shared_expert_intermediate_size=num_shared * inner or None,
        has_shared_gate=False,
        has_correction=True,
        routed_scaling_factor=number(raw, "routed_scaling_factor", 1.0),
        num_groups=whole_or_none(raw, "n_group") or 1,
        num_chosen_groups=whole_or_none(raw, "topk_group") or 1,
        has_wide_router=True,
    )


def guessing_parts(raw: Raw, num_layers: int) -> tuple[str, ...]:
    """What the tensors of layers are called that guess further tokens: they come after the others."""
    fields = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    num_guessing = next(filter(None, (whole_or_none(raw, field) for field in fields)), 0)
    return tuple(f"model.layers.{num_layers + nth}." for nth in range(num_guessing))
