"""The `config.json` of mixtures whose layer is Llama's but for its experts, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..gguf.metadata import HAS_PARTS_APART
from ..model_folder import Raw
from ..model_shape import ModelShape, MoeConfig, MoeNaming
from ..scalars import whole, whole_or_none, wholes
from .llama import read_granite, read_hunyuan, read_llama, read_mistral, read_qwen2, read_qwen3
from .others import with_ropes_by_window
from .sliding_windows import qwen_windows, sliding_layers
from .sparse_layers import with_listed_layers


def read_mixtral(folder: Path, raw: Raw) -> ModelShape:
    plain = read_mistral(folder, raw, rms_norm_eps=1e-5, rope_theta=1e6)
    moe = experts_in_each_layer(plain, "mixtral", whole(raw, "num_local_experts"), whole(raw, "num_experts_per_tok"))
    return replace(plain, moe=moe)


def experts_in_each_layer(plain: ModelShape, naming: MoeNaming, num_experts: int, num_chosen: int) -> MoeConfig:
    """Of the size of the plain model's MLP; the shares of those chosen sum to one."""
    return MoeConfig(
        num_experts,
        num_chosen,
        plain.intermediate_size,
        norm_topk_prob=True,
        sparse_layers=(True,) * plain.num_hidden_layers,
        naming=naming,
    )


def read_qwen2_moe(folder: Path, raw: Raw) -> ModelShape:
    last = whole(raw, "max_window_layers", 28)
    return replace(
        read_qwen2(folder, raw),
        qkv_bias=bool(raw.get("qkv_bias", True)),
        sliding_windows=qwen_windows(raw, lambda layer: layer % 2 == 0 and layer < last),
        moe=read_shared_qwen_moe(raw),
    )


def read_shared_qwen_moe(raw: Raw) -> MoeConfig:
    """Qwen's experts with one beside them that every token has."""
    return replace(_qwen_moe(raw), shared_expert_intermediate_size=whole(raw, "shared_expert_intermediate_size"))


def read_qwen3_moe(folder: Path, raw: Raw) -> ModelShape:
    windows = qwen_windows(raw, lambda layer: True)
    return replace(read_qwen3(folder, raw), sliding_windows=windows, moe=_qwen_moe(raw))


def read_mellum(folder: Path, raw: Raw) -> ModelShape:
    """Mellum 2: Qwen3's mixture whose layers with a window have a rope of their own."""
    is_sliding = sliding_layers(raw, lambda layer: False)
    plain = read_qwen3(folder, {**raw, "rope_parameters": None})
    moe = _qwen_moe({"norm_topk_prob": True, **raw, "decoder_sparse_step": 1, "mlp_only_layers": ()})
    return replace(
        with_ropes_by_window(plain, {"sliding_window": 1024, **raw}, is_sliding, 5e5, 1e4),
        moe=with_listed_layers(moe, raw),
        # Further parts guess further tokens, which is not supported.
        unread_parts=("mtp.",),
    )


def _qwen_moe(raw: Raw) -> MoeConfig:
    step, dense = whole(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return MoeConfig(
        num_experts=whole_or_none(raw, "num_experts") or whole(raw, "num_local_experts"),
        num_experts_per_tok=whole(raw, "num_experts_per_tok"),
        intermediate_size=whole(raw, "moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(whole(raw, "num_hidden_layers"))
        ),
        naming="qwen",
    )


def read_olmoe(folder: Path, raw: Raw) -> ModelShape:
    """OLMoE: a Llama with norms over all heads, and experts in each layer."""
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv is {raw['clip_qkv']}: queries, keys and values that are cut off are not supported")
    plain = read_llama(folder, {"rms_norm_eps": 1e-5, **raw})
    num_experts, num_chosen = whole(raw, "num_experts", 64), whole(raw, "num_experts_per_tok", 8)
    moe = replace(
        experts_in_each_layer(plain, "qwen", num_experts, num_chosen),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
    )
    return replace(plain, mlp_bias=False, qk_norm="all", moe=moe)


def read_granite_moe(folder: Path, raw: Raw) -> ModelShape:
    """The mixtures of Granite 3; with a shared expert in GGUF files alone."""
    granite = read_granite(folder, {**raw, "mlp_bias": False})
    num_experts, num_chosen = whole(raw, "num_local_experts", 8), whole(raw, "num_experts_per_tok", 2)
    moe = experts_in_each_layer(granite, granite_naming(raw, "granite"), num_experts, num_chosen)
    shared = whole_or_none(raw, "shared_intermediate_size") or None
    return replace(granite, moe=replace(moe, shared_expert_intermediate_size=shared, has_shared_gate=False))


def granite_naming(raw: Raw, stacked: MoeNaming) -> MoeNaming:
    """Checkpoints have a layer's experts `stacked`, which no way of quantising is read of."""
    if raw.get(HAS_PARTS_APART):
        return "qwen"
    if raw.get("quantization_config"):
        raise ModelError("quantization_config is set: Granite's mixtures are supported unquantised, use the plain ones")
    return stacked


def read_hunyuan_moe(folder: Path, raw: Raw) -> ModelShape:
    """Hunyuan's mixture (A13B): it says of each layer by itself what all of them have."""
    plain = read_hunyuan(folder, raw)
    inner = _of_all_layers(raw, "moe_intermediate_size", plain.intermediate_size)
    if skipped := whole_or_none(raw, "moe_layer_num_skipped") or 0:
        raise ModelError(f"moe_layer_num_skipped is {skipped}: supported are models with experts in each layer")
    num_experts, num_chosen = _of_all_layers(raw, "num_experts", 1), _of_all_layers(raw, "moe_topk", 1)
    moe = replace(
        experts_in_each_layer(plain, "hunyuan", num_experts, num_chosen),
        intermediate_size=inner,
        shared_expert_intermediate_size=_of_all_layers(raw, "num_shared_expert", 1) * plain.intermediate_size,
        has_shared_gate=False,
        has_wide_router=True,
    )
    return replace(plain, moe=moe)


def _of_all_layers(raw: Raw, field: str, default: int) -> int:
    """A number that a config may have for all layers, or for each of them the same."""
    found = raw.get(field, default)
    numbers = set(wholes(raw, field)) if isinstance(found, list) else {whole(raw, field, default)}
    if len(numbers) != 1:
        raise ModelError(
            f"{field} differs between layers, {sorted(numbers)}: supported are models that have one number"
        )
    return numbers.pop()
