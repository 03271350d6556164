"""The `config.json` of Mistrals that read images, as their reader finds it. Free of torch.

It raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ModelError, shown
from ..model_folder import Raw, at_fault, read_json_object
from ..model_shape import ModelShape
from ..scalars import Section, numbers, positive, require, whole
from ..vision_config import (
    CLIP_MEAN,
    CLIP_STD,
    ProjectorConfig,
    RowEnds,
    VisionConfig,
    VisionNames,
    image_file,
    image_processor,
    tower_of,
)
from .deepseek import read_mistral4
from .llama import read_ministral3, read_mistral
from .others import read_language_model

_DECODERS = {"mistral": read_mistral, "ministral3": read_ministral3, "mistral4": read_mistral4}
_NAMES = VisionNames(
    tower="vision_tower",
    patches="patch_conv",
    blocks="transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    mlp_module="feed_forward",
)


def read_mistral3(folder: Path, raw: Raw) -> ModelShape:
    """Mistral Small from 3.1 on and Ministral 3: a decoder with Pixtral's tower in front (arXiv 2410.07073)."""
    decoder = read_language_model(folder, raw, _DECODERS, {})
    if not raw.get("vision_config"):
        return decoder
    vision = _read_tower(folder, raw, decoder)
    vision.check(folder)
    return replace(decoder, vision=vision, unread_parts=())


def _read_tower(folder: Path, raw: Raw, decoder: ModelShape) -> VisionConfig:
    tower = tower_of(raw)
    _require_tower(raw)
    rope = tower.section("rope_parameters")
    patch_size, merge = tower.positive("patch_size"), positive(raw, "spatial_merge_size", 2)
    with at_fault(image_file(folder)):
        images = image_processor(folder)
        edge = _longest_edge(images, tower)
        mean, std = numbers(images, "image_mean", CLIP_MEAN), numbers(images, "image_std", CLIP_STD)
    return VisionConfig(
        image_token_id=whole(raw, "image_token_index" if "image_token_index" in raw else "image_token_id"),
        depth=tower.positive("num_hidden_layers"),
        hidden_size=tower.positive("hidden_size"),
        intermediate_size=tower.positive("intermediate_size"),
        num_heads=tower.positive("num_attention_heads"),
        out_hidden_size=decoder.hidden_size,
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        num_channels=tower.positive("num_channels", 3),
        min_pixels=(patch_size * merge) ** 2,
        max_pixels=(edge + patch_size * merge) ** 2,
        image_mean=mean,
        image_std=std,
        activation=tower.get("hidden_act", "gelu"),
        longest_edge=edge,
        row_ends=_row_ends(folder),
        norm_eps=1e-5,
        has_biases=False,
        has_patch_norm=True,
        rope_theta=rope.number_or_none("rope_theta") or tower.number_or_none("rope_theta") or 1e4,
        has_frequencies_in_turns=True,
        projector=ProjectorConfig(decoder.rms_norm_eps, bool(raw.get("multimodal_projector_bias", False))),
        names=_NAMES,
    )


def _require_tower(raw: Raw) -> None:
    """Refuse what is another tower, or makes other use of it."""
    tower = tower_of(raw)
    rope = tower.section("rope_parameters")
    tower.require("model_type", "pixtral")
    tower.require("hidden_act", "gelu", "silu")
    rope.require("rope_type", "axial", "default")
    require(raw, "projector_hidden_act", "gelu")
    require(raw, "vision_feature_layer", -1)
    sizes = ("hidden_size", "num_attention_heads")
    hidden_size, heads = (tower.positive(name) for name in sizes)
    head_dim = tower.whole_or_none("head_dim")
    if head_dim is not None and head_dim * heads != hidden_size:
        raise ModelError(f"vision_config.head_dim {head_dim} times {heads} heads is not {hidden_size}")


def _longest_edge(images: Mapping[str, Any], tower: Section) -> int:
    """How many pixels an image's longer side has at most."""
    size = images.get("size") or {"longest_edge": tower.get("image_size", 1540)}
    if not isinstance(size, Mapping) or not size.get("longest_edge"):
        raise ModelError(f"size is {shown(size)}; supported: a longest_edge")
    return positive(size, "longest_edge", within="size.")


def _row_ends(folder: Path) -> RowEnds:
    file = folder / "processor_config.json"
    processor = read_json_object(file) if file.is_file() else {}
    row, image = (processor.get(f"image_{end}_token") for end in ("break", "end"))
    return RowEnds(folder, str(row or "[IMG_BREAK]"), str(image or "[IMG_END]"))
