"""The `config.json` of OLMo Hybrid: an OLMo 3 of whose layers most have a Gated DeltaNet for attention. Free of torch.

It raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ..model_folder import Raw
from ..model_shape import ModelShape
from ..other_names import OtherNames
from ..rope_config import RopeConfig
from ..scalars import number_or_none, whole, whole_or_none
from ..state_layers import GatedDeltaNetConfig, GatedDeltaNetNames
from .layer_types import read_layer_types
from .others import read_olmo2

_KINDS = ("linear_attention", "full_attention")
_NAMES = GatedDeltaNetNames(
    mixed=("q_proj", "k_proj", "v_proj"),
    # transformers writes three of one size, whatever queries, keys and values have.
    conv_parts=("q_conv1d", "k_conv1d", "v_conv1d"),
    gates="g_proj",
    steps=("b_proj", "a_proj"),
    norm="o_norm",
    output="o_proj",
)


def read_olmo_hybrid(folder: Path, raw: Raw) -> ModelShape:
    """Its norms stand before a DeltaNet, and behind attention, which knows positions where a theta is given alone."""
    plain = read_olmo2(folder, {"rms_norm_eps": 1e-6, **raw})
    if number_or_none(raw.get("rope_parameters") or {}, "rope_theta") is None:
        plain = replace(plain, ropes=tuple(RopeConfig(rope.theta, "none") for rope in plain.ropes))
    is_linear = _linear_layers(raw)
    return replace(
        plain,
        decoder_layer="olmo_hybrid",
        state_layers=_read_delta_net(raw, plain, is_linear),
        # The norm behind attention, which transformers writes by the name of that before a DeltaNet's MLP.
        other_names=OtherNames(
            tuple(
                (f"model.layers.{layer}.feedforward_layer_norm.", f"model.layers.{layer}.post_attention_layernorm.")
                for layer, linear in enumerate(is_linear)
                if not linear
            )
        ),
    )


def _linear_layers(raw: Raw) -> tuple[bool, ...]:
    # Every fourth attends, or of fewer than four the last.
    interval = min(4, whole(raw, "num_hidden_layers"))
    kinds = read_layer_types(raw, _KINDS, lambda layer: _KINDS[(layer + 1) % interval == 0])
    return tuple(kind == "linear_attention" for kind in kinds)


def _read_delta_net(raw: Raw, plain: ModelShape, is_linear: tuple[bool, ...]) -> GatedDeltaNetConfig | None:
    if not any(is_linear):
        return None
    key_heads = whole_or_none(raw, "linear_num_key_heads") or plain.num_attention_heads
    key_dim = whole_or_none(raw, "linear_key_head_dim") or int(0.75 * plain.hidden_size / key_heads)
    return GatedDeltaNetConfig(
        num_key_heads=key_heads,
        num_heads=whole_or_none(raw, "linear_num_value_heads") or plain.num_attention_heads,
        key_dim=key_dim,
        value_dim=whole_or_none(raw, "linear_value_head_dim") or 2 * key_dim,
        conv_width=whole(raw, "linear_conv_kernel_dim", 4),
        layers=is_linear,
        doubles_beta=bool(raw.get("linear_allow_neg_eigval", True)),
        norm_eps=1e-5,
        names=_NAMES,
    )
