"""The `config.json` of Qwens of whose layers most have a state instead of keys and values. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ..model_folder import Raw
from ..model_shape import ModelShape
from ..scalars import whole, whole_or_none
from ..state_layers import GatedDeltaNetConfig
from .layer_types import read_layer_types
from .llama import read_plain, read_rotary_dim, require_activation
from .mixtures import read_shared_qwen_moe

# Of Qwen3-Next and Qwen3.5 alike, where a config leaves them out.
_DEFAULTS = {"head_dim": 256, "rope_theta": 1e7}
_KINDS = ("linear_attention", "full_attention")


def read_qwen3_next(folder: Path, raw: Raw) -> ModelShape:
    """Qwen3-Next: a mixture, as checkpoints have it with one expert after the other."""
    shape = _read(folder, raw, is_grouped=True)
    return replace(shape, moe=replace(read_shared_qwen_moe(raw), norm_topk_prob=bool(raw.get("norm_topk_prob", True))))


def read_qwen3_5_text(folder: Path, raw: Raw) -> ModelShape:
    """The decoder of Qwen3.5, which is a mixture where it says how many experts it has."""
    if not raw.get("num_experts"):
        return _read(folder, raw)
    # Its MLPs are all experts.
    shape = _read(folder, {**raw, "intermediate_size": raw["moe_intermediate_size"]})
    return replace(shape, moe=replace(read_shared_qwen_moe(raw), norm_topk_prob=True, naming="qwen-stacked"))


def _read(folder: Path, raw: Raw, is_grouped: bool = False) -> ModelShape:
    require_activation(raw, "hidden_act", "silu")
    plain = read_plain(folder, {**_DEFAULTS, **raw})
    bias = bool(raw.get("attention_bias", False))
    return replace(
        plain,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        norm_offset=1.0,
        rotary_dim=read_rotary_dim(raw, plain.head_dim, 0.25),
        has_output_gate=True,
        state_layers=GatedDeltaNetConfig(
            num_key_heads=whole(raw, "linear_num_key_heads", 16),
            num_heads=whole(raw, "linear_num_value_heads", 32),
            key_dim=whole(raw, "linear_key_head_dim", 128),
            value_dim=whole(raw, "linear_value_head_dim", 128),
            conv_width=whole(raw, "linear_conv_kernel_dim", 4),
            layers=_linear_layers(raw),
            is_grouped=is_grouped,
        ),
        # It guesses tokens ahead.
        unread_parts=("mtp.",),
    )


def _linear_layers(raw: Raw) -> tuple[bool, ...]:
    interval = whole_or_none(raw, "full_attention_interval") or 4
    kinds = read_layer_types(raw, _KINDS, lambda layer: _KINDS[(layer + 1) % interval == 0])
    return tuple(kind == "linear_attention" for kind in kinds)
