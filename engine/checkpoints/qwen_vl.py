"""The `config.json` of Qwens that read images, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

from dataclasses import replace
from pathlib import Path

from ..errors import ModelError
from .llama_families import read_qwen2
from .model_folder import Raw
from .model_shape import ModelShape
from .vision_config import ImageScale, VisionConfig, decoder_fields, read_rope_fields, read_scale

# As published with Qwen2-VL.
_QWEN2_IMAGES = ImageScale(
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)


def read_qwen2_5_vl(folder: Path, raw: Raw) -> ModelShape:
    """Qwen2 with a vision tower in front (arXiv 2502.13923)."""
    tower = raw["vision_config"]
    if (activation := tower.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"unsupported vision_config.hidden_act {activation!r}; supported: silu")
    vision = replace(
        _read_tower(raw, read_scale(folder, _QWEN2_IMAGES), patch_size=14),
        window_size=int(tower.get("window_size", 112)),
        full_attention_layers=frozenset(map(int, tower.get("fullatt_block_indexes", (7, 15, 23, 31)))),
    )
    section = tuple(map(int, read_rope_fields(raw)["mrope_section"]))
    axes = tuple(axis for axis, number in enumerate(section) for _ in range(number))
    return _seeing(read_qwen2(folder, decoder_fields(raw)), vision, section, axes)


def _read_tower(raw: Raw, scale: ImageScale, patch_size: int) -> VisionConfig:
    """What all families read the same way. `patch_size`: for a folder that does not say."""
    tower = raw["vision_config"]
    return VisionConfig(
        image_token_id=int(raw["image_token_id"]),
        depth=int(tower["depth"]),
        hidden_size=int(tower["hidden_size"]),
        intermediate_size=int(tower["intermediate_size"]),
        num_heads=int(tower["num_heads"]),
        out_hidden_size=int(tower["out_hidden_size"]),
        patch_size=int(tower.get("patch_size", patch_size)),
        temporal_patch_size=int(tower.get("temporal_patch_size", 2)),
        spatial_merge_size=int(tower.get("spatial_merge_size", 2)),
        num_channels=int(tower.get("in_channels") or tower.get("in_chans") or 3),
        **vars(scale),
    )


def _seeing(decoder: ModelShape, vision: VisionConfig, section: tuple[int, ...], axes: tuple[int, ...]) -> ModelShape:
    """`section`: as the config has it, of which `axes` were made."""
    vision.check()
    if vision.out_hidden_size != decoder.hidden_size:
        size = vision.out_hidden_size
        raise ModelError(f"vision_config.out_hidden_size {size} is not hidden_size {decoder.hidden_size}")
    if len(section) != 3 or 2 * sum(section) != decoder.rotary_dim:
        raise ModelError(f"mrope_section {list(section)} must be {decoder.rotary_dim // 2} together")
    return replace(decoder, vision=vision, mrope_axes=axes)
