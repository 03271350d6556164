"""What a model's eyes are: the vision tower's shape, and how images are made ready for it. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .model_folder import Raw, read_json_object

# As published with Qwen2-VL, for folders that do not say.
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionConfig:
    """The tower of Qwen2.5-VL: patches of `patch_size` pixels, of which `spatial_merge_size` squared become a token.

    Layers attend within windows of `window_size` pixels, but for the `full_attention_layers`. Images are resized to
    between `min_pixels` and `max_pixels`, then to (x / 255 - `image_mean`) / `image_std`. `image_token_id` stands in a
    prompt for each token of an image.
    """

    image_token_id: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int
    full_attention_layers: frozenset[int]
    num_channels: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @property
    def factor(self) -> int:
        """How many pixels a token's side has."""
        return self.patch_size * self.spatial_merge_size

    @property
    def patch_values(self) -> int:
        """How many numbers a patch is."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2


def read_vision(folder: Path, raw: Raw) -> VisionConfig:
    """`raw`: the whole `config.json`. Raises `ModelError`, `KeyError` for a field that is missing."""
    tower = raw["vision_config"]
    if (activation := tower.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"unsupported vision_config.hidden_act {activation!r}; supported: silu")
    images = _image_processor(folder)
    size = images.get("size") or {}
    config = VisionConfig(
        image_token_id=int(raw["image_token_id"]),
        depth=int(tower["depth"]),
        hidden_size=int(tower["hidden_size"]),
        intermediate_size=int(tower["intermediate_size"]),
        num_heads=int(tower["num_heads"]),
        out_hidden_size=int(tower["out_hidden_size"]),
        patch_size=int(tower.get("patch_size", 14)),
        temporal_patch_size=int(tower.get("temporal_patch_size", 2)),
        spatial_merge_size=int(tower.get("spatial_merge_size", 2)),
        window_size=int(tower.get("window_size", 112)),
        full_attention_layers=frozenset(map(int, tower.get("fullatt_block_indexes", (7, 15, 23, 31)))),
        num_channels=int(tower.get("in_channels") or tower.get("in_chans") or 3),
        min_pixels=int(images.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS),
        max_pixels=int(images.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS),
        image_mean=tuple(map(float, images.get("image_mean") or _MEAN)),
        image_std=tuple(map(float, images.get("image_std") or _STD)),
    )
    _check(config)
    return config


def decoder_fields(raw: Raw) -> Raw:
    """The decoder's own `config.json`. transformers 5 writes its fields apart, before they were beside the others."""
    text = raw.get("text_config") or {}
    rope = _rope(raw)
    # "mrope" says no more than that there is a `mrope_section`.
    is_plain = "mrope" in (rope.get("type"), rope.get("rope_type"))
    ends = raw["eos_token_id"] or text.get("eos_token_id") or []
    return {
        **raw,
        **text,
        "rope_parameters": {**rope, "type": "default", "rope_type": "default"} if is_plain else rope,
        "eos_token_id": ends if isinstance(ends, list) else [ends],
        "tie_word_embeddings": raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False),
        "dtype": text.get("dtype") or raw.get("dtype") or raw.get("torch_dtype"),
    }


def read_mrope_section(raw: Raw, rotary_dim: int) -> tuple[int, int, int]:
    """How many of a head's frequencies turn by time, by height and by width. Raises `ModelError`, `KeyError`."""
    time, height, width = map(int, _rope(raw)["mrope_section"])
    if 2 * (time + height + width) != rotary_dim:
        raise ModelError(f"mrope_section {[time, height, width]} must be {rotary_dim // 2} together")
    return time, height, width


def _rope(raw: Raw) -> Mapping[str, Any]:
    text = raw.get("text_config") or {}
    for fields in (text, raw):
        for name in ("rope_parameters", "rope_scaling"):
            rope: Mapping[str, Any] = fields.get(name) or {}
            if rope:
                return rope
    return {}


def _image_processor(folder: Path) -> Mapping[str, Any]:
    """What the folder says of images, in the file of its own or in the one for all kinds of input."""
    if (file := folder / "preprocessor_config.json").is_file():
        return read_json_object(file)
    if (file := folder / "processor_config.json").is_file():
        return read_json_object(file).get("image_processor") or {}
    return {}


def _check(config: VisionConfig) -> None:
    for name in ("depth", "hidden_size", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size"):
        if (size := getattr(config, name)) < 1:
            raise ModelError(f"vision_config.{name} must be at least 1, not {size}")
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 4:
        raise ModelError(
            f"vision_config.hidden_size {config.hidden_size} must be a multiple of 4 times num_heads {config.num_heads}"
        )
    if config.window_size < config.factor:
        raise ModelError(
            f"vision_config.window_size {config.window_size} is less than a token's {config.factor} pixels"
        )
    if not config.factor**2 <= config.min_pixels <= config.max_pixels:
        raise ModelError(
            f"min_pixels {config.min_pixels} and max_pixels {config.max_pixels} must be in this order, from "
            f"{config.factor**2} on: see preprocessor_config.json"
        )
    if len(config.image_mean) != config.num_channels or len(config.image_std) != config.num_channels:
        raise ModelError(f"image_mean and image_std must have {config.num_channels} numbers each")
