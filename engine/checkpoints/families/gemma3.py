"""The `config.json` of Gemma 3s that read images, as their reader finds it. Free of torch.

It raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...errors import ModelError, shown
from ..model_folder import Raw, at_fault
from ..model_shape import ModelShape
from ..scalars import numbers, positive, require, whole
from ..vision_config import (
    ImageFrame,
    PoolConfig,
    VisionConfig,
    VisionNames,
    image_file,
    image_processor,
    tower_of,
)
from .others import read_gemma3, read_language_model

# What one that reads images may leave out in its `text_config`.
_DECODER = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
# As Pillow numbers them.
_RESAMPLING: dict[Any, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
_NAMES = VisionNames(
    tower="vision_tower",
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    blocks="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp=("fc1", "fc2"),
)


def read_seeing_gemma3(folder: Path, raw: Raw) -> ModelShape:
    """Gemma 3 (arXiv 2503.19786): a decoder with SigLIP's tower (arXiv 2303.15343) in front."""
    decoder = read_language_model(folder, raw, {"gemma3_text": read_gemma3}, _DECODER)
    if not raw.get("vision_config"):
        return decoder
    vision = _read_tower(folder, raw, decoder)
    vision.check(folder)
    # What makes one vector of a whole image, which some have in their files, is no part of it.
    return replace(decoder, vision=vision, unread_parts=("vision_tower.head.",))


def _read_tower(folder: Path, raw: Raw, decoder: ModelShape) -> VisionConfig:
    tower = tower_of(raw)
    tower.require("model_type", "siglip_vision_model")
    tower.require("hidden_act", "gelu_pytorch_tanh")
    side, patch_size = tower.positive("image_size", 224), tower.positive("patch_size", 16)
    merge = _patches_per_token_side(side // patch_size, positive(raw, "mm_tokens_per_image", 256))
    eps = tower.number("layer_norm_eps", 1e-6)
    with at_fault(image_file(folder)):
        images = image_processor(folder)
        _require_whole_squares(images, side)
        mean, std = numbers(images, "image_mean", (0.5,) * 3), numbers(images, "image_std", (0.5,) * 3)
        resampling = _RESAMPLING[images.get("resample", 2)]
    return VisionConfig(
        image_token_id=whole(raw, "image_token_index" if "image_token_index" in raw else "image_token_id", 262_144),
        depth=tower.positive("num_hidden_layers", 12),
        hidden_size=tower.positive("hidden_size", 768),
        intermediate_size=tower.positive("intermediate_size", 3072),
        num_heads=tower.positive("num_attention_heads", 12),
        out_hidden_size=decoder.hidden_size,
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        num_channels=tower.positive("num_channels", 3),
        min_pixels=side**2,
        max_pixels=side**2,
        image_mean=mean,
        image_std=std,
        activation="gelu_tanh",
        image_side=side,
        resampling=resampling,
        frame=ImageFrame(
            whole(raw, "boi_token_index", 255_999), whole(raw, "eoi_token_index", 256_000), newlines=folder
        ),
        two_way_layers="all",
        has_layer_norms=True,
        has_patch_biases=True,
        norm_eps=eps,
        has_final_norm=True,
        rope_theta=None,
        projector=PoolConfig(eps),
        position_side=side // patch_size,
        names=_NAMES,
    )


def _patches_per_token_side(patches: int, num_tokens: int) -> int:
    """How many patches lie along a token's side, of so many along an image's, which becomes so many tokens."""
    tokens = math.isqrt(num_tokens)
    if tokens**2 != num_tokens or patches % tokens:
        raise ModelError(
            f"mm_tokens_per_image {num_tokens} must be a square of what divides the {patches} patches of a side"
        )
    return patches // tokens


def _require_whole_squares(images: Mapping[str, Any], side: int) -> None:
    """Refuse images that are made ready otherwise than as squares of so many pixels a side."""
    if images.get("do_pan_and_scan"):
        raise ModelError("do_pan_and_scan is set: images are shown whole, with no parts beside: set it to false")
    size = images.get("size") or {"height": side, "width": side}
    if not isinstance(size, Mapping) or (size.get("height"), size.get("width")) != (side, side):
        raise ModelError(f"size is {shown(size)}, and must be the tower's: height and width of {side}")
    require(images, "resample", *_RESAMPLING)
