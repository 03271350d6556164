"""The `config.json` of Qwens that read images, as their readers find it. Free of torch.

Each raises `ModelError` for what is not supported, and `KeyError` naming a field that is missing.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import DecoderNames, ModelShape
from ..other_names import NESTED_NAMES, QWEN2_VL_NAMES
from ..rope_config import rope_place
from ..scalars import whole, wholes
from ..vision_config import (
    CLIP_MEAN,
    CLIP_STD,
    ImageScale,
    VisionConfig,
    VisionNames,
    read_scale,
    tower_of,
)
from .llama import read_qwen2, read_qwen3
from .mixtures import read_qwen3_moe
from .qwen_next import read_qwen3_5_text
from .text_config import decoder_fields, decoder_rope

# As published with Qwen2-VL.
_QWEN2_IMAGES = ImageScale(
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
)
_QWEN3_IMAGES = ImageScale(min_pixels=2**16, max_pixels=2**24, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)


def read_qwen2_vl(folder: Path, raw: Raw) -> ModelShape:
    """Qwen2 with a vision tower in front (arXiv 2409.12191)."""
    tower = tower_of(raw)
    tower.require("hidden_act", "quick_gelu")
    size = tower.positive("embed_dim")
    # By the others' names: `hidden_size` is the decoder's here.
    sizes = {"hidden_size": size, "intermediate_size": int(size * tower.number("mlp_ratio", 4))}
    renamed = {**raw, "vision_config": {**tower.raw, **sizes, "out_hidden_size": tower.positive("hidden_size")}}
    vision = replace(
        _read_tower(renamed, read_scale(folder, _QWEN2_IMAGES), patch_size=14),
        activation="quick_gelu",
        has_layer_norms=True,
        names=VisionNames(mlp=("fc1", "fc2")),
    )
    return _seeing_qwen2(folder, raw, vision)


def read_qwen2_5_vl(folder: Path, raw: Raw) -> ModelShape:
    """The same with a tower that has windows (arXiv 2502.13923)."""
    tower = tower_of(raw)
    tower.require("hidden_act", "silu")
    vision = replace(
        _read_tower(raw, read_scale(folder, _QWEN2_IMAGES), patch_size=14),
        window_size=tower.whole("window_size", 112),
        full_attention_layers=frozenset(tower.wholes("fullatt_block_indexes", (7, 15, 23, 31))),
    )
    return _seeing_qwen2(folder, raw, vision)


def _seeing_qwen2(folder: Path, raw: Raw, vision: VisionConfig) -> ModelShape:
    section = wholes(decoder_rope(raw), "mrope_section", within=rope_place(raw))
    axes = tuple(axis for axis, length in enumerate(section) for _ in range(length))
    decoder = replace(read_qwen2(folder, decoder_fields(raw)), other_names=QWEN2_VL_NAMES)
    return _seeing(decoder, vision, section, axes)


def read_qwen3_vl(folder: Path, raw: Raw) -> ModelShape:
    """Qwen3 with a tower of which some layers speak to the decoder's first ones (arXiv 2511.21631)."""
    return _read_qwen3(folder, raw, {"head_dim": 128}, read_qwen3)


def read_qwen3_vl_moe(folder: Path, raw: Raw) -> ModelShape:
    """The same with Qwen3's mixtures, whose experts lie stacked on disk where they are not quantised."""
    # Not a field of its own: the experts chosen always have all of a token.
    seeing = _read_qwen3(folder, raw, {}, lambda folder, text: read_qwen3_moe(folder, {**text, "norm_topk_prob": True}))
    return replace(seeing, moe=None if seeing.moe is None else replace(seeing.moe, naming="qwen-stacked"))


def read_qwen3_5(folder: Path, raw: Raw) -> ModelShape:
    """Qwen3.5, whose tower has nothing to say to the decoder's layers."""
    tower = {**raw["vision_config"], "deepstack_visual_indexes": ()}
    return _read_qwen3(folder, {**raw, "vision_config": tower}, {}, read_qwen3_5_text, sections=(11, 11, 10))


def _read_qwen3(
    folder: Path,
    raw: Raw,
    defaults: Raw,
    read: Callable[[Path, Raw], ModelShape],
    sections: tuple[int, ...] = (24, 20, 20),
) -> ModelShape:
    """`read`: of its decoder, which has `defaults` for fields left out, and a rope of these `sections`."""
    tower, text = tower_of(raw), raw["text_config"]
    tower.require("hidden_act", "gelu_pytorch_tanh")
    vision = replace(
        _read_tower(raw, read_scale(folder, _QWEN3_IMAGES), patch_size=16),
        activation="gelu_tanh",
        has_layer_norms=True,
        has_patch_biases=True,
        position_side=_position_side(tower.whole("num_position_embeddings", 2304)),
        deepstack_layers=tower.wholes("deepstack_visual_indexes", (8, 16, 24)),
        names=VisionNames(
            "model.visual", mlp=("linear_fc1", "linear_fc2"), merger=("norm", "linear_fc1", "linear_fc2")
        ),
    )
    # What the whole model says counts: transformers writes beside it what a decoder alone would have.
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))}
    decoder = read(folder, {"rope_theta": 5e5, **defaults, **decoder_fields(raw), **tied})
    if len(vision.deepstack_layers) >= decoder.num_hidden_layers:
        raise ModelError(
            f"vision_config.deepstack_visual_indexes has {len(vision.deepstack_layers)} entries, which must be fewer "
            f"than num_hidden_layers {decoder.num_hidden_layers}"
        )
    language = "model.language_model"
    names = DecoderNames(f"{language}.embed_tokens", f"{language}.layers", f"{language}.norm")
    name = "mrope_section"
    section = wholes({name: decoder_rope(raw).get(name) or sections}, name, within=rope_place(raw))
    decoder = replace(decoder, names=names, other_names=NESTED_NAMES)
    return _seeing(decoder, vision, section, _in_turns(section))


def _in_turns(section: tuple[int, ...]) -> tuple[int, ...]:
    """Time, height, width, time and so on, each as often as it has frequencies; those that are left over are time's."""
    axes = [0] * sum(section)
    for axis, length in enumerate(section):
        for place in range(axis, min(3 * length, len(axes)), 3):
            axes[place] = axis
    return tuple(axes)


def _position_side(num_positions: int) -> int:
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise ModelError(f"vision_config.num_position_embeddings {num_positions} is no square of a whole number")
    return side


def _read_tower(raw: Raw, scale: ImageScale, patch_size: int) -> VisionConfig:
    """What all families read the same way. `patch_size`: for a folder that does not say."""
    tower = tower_of(raw)
    channels = (tower.whole_or_none(name) for name in ("in_channels", "in_chans"))
    return VisionConfig(
        image_token_id=whole(raw, "image_token_id"),
        depth=tower.positive("depth"),
        hidden_size=tower.positive("hidden_size"),
        intermediate_size=tower.positive("intermediate_size"),
        num_heads=tower.positive("num_heads"),
        out_hidden_size=tower.positive("out_hidden_size"),
        patch_size=tower.positive("patch_size", patch_size),
        temporal_patch_size=tower.positive("temporal_patch_size", 2),
        spatial_merge_size=tower.positive("spatial_merge_size", 2),
        num_channels=next(filter(None, channels), 3),
        **vars(scale),
    )


def _seeing(decoder: ModelShape, vision: VisionConfig, section: tuple[int, ...], axes: tuple[int, ...]) -> ModelShape:
    """`section`: as the config has it, of which `axes` were made."""
    vision.check(decoder.path)
    if vision.out_hidden_size != decoder.hidden_size:
        size = vision.out_hidden_size
        raise ModelError(f"vision_config.out_hidden_size {size} is not hidden_size {decoder.hidden_size}")
    if len(section) != 3 or 2 * sum(section) != decoder.rotary_dim:
        raise ModelError(f"mrope_section {list(section)} must be {decoder.rotary_dim // 2} together")
    return replace(decoder, vision=vision, mrope_axes=axes)
