"""The `config.json` of Gemma 4s that read images, as their reader finds it. Free of torch.

It raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..model_folder import Raw, at_fault
from ..model_shape import ModelShape
from ..scalars import Section, positive, whole, whole_or_none
from ..vision_config import (
    ImageFrame,
    ScaledPoolConfig,
    VisionConfig,
    VisionNames,
    image_file,
    image_processor,
    tower_of,
)
from .gemma4 import EYES, read_gemma4_text
from .others import GEMMA_NORMS

_NAMES = VisionNames(
    tower="model.vision_tower",
    patches="patch_embedder.input_proj",
    positions="patch_embedder.position_embedding_table",
    blocks="encoder.layers",
    norms=GEMMA_NORMS,
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    output="self_attn.o_proj.linear",
    mlp=("gate_proj.linear", "up_proj.linear", "down_proj.linear"),
    projector="model.embed_vision",
)


def read_seeing_gemma4(folder: Path, raw: Raw) -> ModelShape:
    """Gemma 4 with a tower whose images keep their shape; audio and video are not read."""
    decoder = read_gemma4_text(folder, raw)
    if not raw.get("vision_config"):
        return decoder
    vision = _read_tower(folder, raw, decoder)
    vision.check(folder)
    unread = tuple(part for part in decoder.unread_parts if part not in EYES)
    return replace(decoder, vision=vision, unread_parts=unread)


def _read_tower(folder: Path, raw: Raw, decoder: ModelShape) -> VisionConfig:
    tower, text = tower_of(raw), raw["text_config"]
    rope = tower.section("rope_parameters")
    tower.require("model_type", "gemma4_vision")
    tower.require("hidden_activation", "gelu_pytorch_tanh")
    rope.require("rope_type", "axial", "default")
    patch_size, merge = tower.positive("patch_size", 16), tower.positive("pooling_kernel_size", 3)
    with at_fault(image_file(folder)):
        max_tokens = _max_tokens(image_processor(folder), patch_size, merge)
    vision = VisionConfig(
        image_token_id=whole(raw, "image_token_id", 258_880),
        depth=tower.positive("num_hidden_layers", 16),
        hidden_size=tower.positive("hidden_size", 768),
        intermediate_size=tower.positive("intermediate_size", 3072),
        num_heads=tower.positive("num_attention_heads", 12),
        out_hidden_size=decoder.hidden_size,
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        num_channels=3,
        min_pixels=(patch_size * merge) ** 2,
        max_pixels=max_tokens * (patch_size * merge) ** 2,
        image_mean=(0.5,) * 3,
        image_std=(0.5,) * 3,
        activation="gelu_tanh",
        fills_pixels=True,
        frame=ImageFrame(whole(raw, "boi_token_id", 255_999), whole(raw, "eoi_token_id", 258_882)),
        two_way_layers="windows" if text.get("use_bidirectional_attention") == "vision" else None,
        layer_input_token_id=whole_or_none(text, "pad_token_id") or 0,
        norm_eps=tower.number("rms_norm_eps", 1e-6),
        has_biases=False,
        has_limits=bool(tower.get("use_clipped_linears", False)),
        has_channels_last=True,
        has_head_norms=True,
        rope_theta=rope.number_or_none("rope_theta") or 100.0,
        has_axes_apart=True,
        projector=ScaledPoolConfig(bool(tower.get("standardize", False))),
        num_axis_positions=tower.positive("position_embedding_size", 10_240),
        names=_NAMES,
    )
    return _checked(vision, tower)


def _checked(vision: VisionConfig, tower: Section) -> VisionConfig:
    """Refuse heads of other sizes, and fewer positions than an image may have."""
    heads, head_dim = (tower.whole_or_none(name) for name in ("num_key_value_heads", "head_dim"))
    if heads not in (None, vision.num_heads) or head_dim not in (None, vision.hidden_size / vision.num_heads):
        raise ModelError(
            f"vision_config.num_key_value_heads {heads} and head_dim {head_dim} must be as many as there are heads, "
            f"{vision.num_heads}, and what each has of hidden_size {vision.hidden_size}"
        )
    longest, num_positions = vision.max_tokens * vision.spatial_merge_size, vision.num_axis_positions or 0
    if longest > num_positions:
        raise ModelError(
            f"vision_config.position_embedding_size {num_positions} is less than the {longest} patches that an image's "
            "side may have"
        )
    return vision


def _max_tokens(images: Mapping[str, Any], patch_size: int, merge: int) -> int:
    """How many an image has; refuses images that are made ready for another tower, or normalised before it."""
    for name, expected in (("patch_size", patch_size), ("pooling_kernel_size", merge)):
        if (found := images.get(name, expected)) != expected:
            raise ModelError(f"{name} is {found!r}, and must be the tower's: {expected}")
    if images.get("do_normalize"):
        raise ModelError("do_normalize is set: the tower does that itself: set it to false")
    return positive(images, "max_soft_tokens", 280)
