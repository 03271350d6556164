"""The `config.json` of Mistrals that read images, as their reader finds it. Free of torch.

It raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..model_folder import Raw, read_json_object
from ..model_shape import ModelShape
from ..vision_config import (
    CLIP_MEAN,
    CLIP_STD,
    ProjectorConfig,
    RowEnds,
    VisionConfig,
    VisionNames,
    image_processor,
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
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size")


def read_mistral3(folder: Path, raw: Raw) -> ModelShape:
    """Mistral Small from 3.1 on and Ministral 3: a decoder with Pixtral's tower in front (arXiv 2410.07073)."""
    decoder = read_language_model(folder, raw, _DECODERS, {})
    if not raw.get("vision_config"):
        return decoder
    vision = _read_tower(folder, raw, decoder)
    vision.check()
    return replace(decoder, vision=vision, unread_parts=())


def _read_tower(folder: Path, raw: Raw, decoder: ModelShape) -> VisionConfig:
    tower = raw["vision_config"]
    _require_tower(raw)
    rope = tower.get("rope_parameters") or {}
    patch_size, merge = int(tower["patch_size"]), int(raw.get("spatial_merge_size", 2))
    images = image_processor(folder)
    edge = _longest_edge(images, tower)
    return VisionConfig(
        image_token_id=int(raw["image_token_index"] if "image_token_index" in raw else raw["image_token_id"]),
        depth=int(tower["num_hidden_layers"]),
        hidden_size=int(tower["hidden_size"]),
        intermediate_size=int(tower["intermediate_size"]),
        num_heads=int(tower["num_attention_heads"]),
        out_hidden_size=decoder.hidden_size,
        patch_size=patch_size,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        num_channels=int(tower.get("num_channels", 3)),
        min_pixels=(patch_size * merge) ** 2,
        max_pixels=(edge + patch_size * merge) ** 2,
        image_mean=tuple(map(float, images.get("image_mean") or CLIP_MEAN)),
        image_std=tuple(map(float, images.get("image_std") or CLIP_STD)),
        activation=tower.get("hidden_act", "gelu"),
        longest_edge=edge,
        row_ends=_row_ends(folder),
        norm_eps=1e-5,
        has_biases=False,
        has_patch_norm=True,
        rope_theta=float(rope.get("rope_theta") or tower.get("rope_theta") or 1e4),
        has_frequencies_in_turns=True,
        projector=ProjectorConfig(decoder.rms_norm_eps, bool(raw.get("multimodal_projector_bias", False))),
        names=_NAMES,
    )


def _require_tower(raw: Raw) -> None:
    """Refuse what is another tower, or makes other use of it."""
    tower = raw["vision_config"]
    rope_type = (tower.get("rope_parameters") or {}).get("rope_type", "axial")
    for name, found, *allowed in (
        ("vision_config.model_type", tower.get("model_type", "pixtral"), "pixtral"),
        ("vision_config.hidden_act", tower.get("hidden_act", "gelu"), "gelu", "silu"),
        ("vision_config.rope_parameters.rope_type", rope_type, "axial", "default"),
        ("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu"),
        ("vision_feature_layer", raw.get("vision_feature_layer", -1), -1),
    ):
        if found not in allowed:
            raise ModelError(f"unsupported {name} {found!r}; supported: {', '.join(map(str, allowed))}")
    for name in _SIZES:
        if (size := int(tower[name])) < 1:
            raise ModelError(f"vision_config.{name} must be at least 1, not {size}")
    heads, head_dim = int(tower["num_attention_heads"]), tower.get("head_dim")
    if head_dim is not None and int(head_dim) * heads != int(tower["hidden_size"]):
        raise ModelError(f"vision_config.head_dim {head_dim} times {heads} heads is not {tower['hidden_size']}")


def _longest_edge(images: Mapping[str, Any], tower: Raw) -> int:
    """How many pixels an image's longer side has at most."""
    size = images.get("size") or {"longest_edge": tower.get("image_size", 1540)}
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    if not edge or int(edge) < 1:
        raise ModelError(f"preprocessor_config.json has the size {size}; supported: a longest_edge")
    return int(edge)


def _row_ends(folder: Path) -> RowEnds:
    file = folder / "processor_config.json"
    processor = read_json_object(file) if file.is_file() else {}
    row, image = (processor.get(f"image_{end}_token") for end in ("break", "end"))
    return RowEnds(folder, str(row or "[IMG_BREAK]"), str(image or "[IMG_END]"))
