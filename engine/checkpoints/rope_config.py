"""How a checkpoint's rotary positions are stretched, read from the several ways in which `config.json` says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError

# Of "none" nothing turns, and no config says so by this name.
RopeType = Literal["default", "none", "linear", "llama3", "yarn", "longrope", "proportional"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for stretched contexts, how frequencies are rescaled.

    The fields after `rope_type` are as in Hugging Face's `rope_scaling`, each used by the types that have it there;
    `attention_factor` multiplies sines and cosines.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # longrope: one number a frequency, for contexts up to the original one and beyond it
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # proportional: of the frequencies, the fastest first, how many turn
    turning_share: float = 1.0


def read_rope(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """One rope of a model: `scaling` is its `rope_parameters` or `rope_scaling`, `raw` the whole `config.json`.

    `theta` counts where `scaling` has none. Raises `ModelError` for a type that is not in `ROPE_TYPES`, `KeyError`
    for a field that its type needs.
    """
    theta = float(scaling.get("rope_theta") or theta)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    match rope_type:
        # A dynamic one stretches what is longer than the model's own context, which nothing here is.
        case "default" | "dynamic":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", factor=float(scaling["factor"]))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=float(scaling["factor"]),
                original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            )
        case "proportional":
            factor, share = scaling.get("factor") or 1.0, scaling.get("partial_rotary_factor") or 1.0
            return RopeConfig(theta, "proportional", factor=float(factor), turning_share=float(share))
        case "yarn":
            return _yarn(scaling, theta, raw)
        # Phi-3's first release called it "su".
        case "longrope" | "su":
            return _longrope(scaling, theta, raw)
    raise ModelError(f"unsupported rope scaling {rope_type!r}; supported: {', '.join(ROPE_TYPES)}, dynamic")


def _yarn(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """YaRN (Peng et al., arXiv 2309.00071)."""
    factor = float(scaling["factor"])
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=_original_context(scaling, raw),
        attention_factor=_yarn_attention_factor(scaling) if attention_factor is None else float(attention_factor),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """As the factor has it, times `mscale` over `mscale_all_dim` where both are given."""
    growth = 0.1 * math.log(max(1.0, float(scaling["factor"])))
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return (1 + float(above) * growth) / (1 + float(below) * growth) if above and below else 1 + growth


def _longrope(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """LongRoPE (Ding et al., arXiv 2402.13753), as Phi-3 has it."""
    original = _original_context(scaling, raw)
    factor = float(scaling.get("factor") or int(raw["max_position_embeddings"]) / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        short_factor=tuple(map(float, scaling["short_factor"])),
        long_factor=tuple(map(float, scaling["long_factor"])),
    )


def _original_context(scaling: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """The context that the model was first trained for; Phi-3 says it beside the rope's own fields."""
    for source in (raw, scaling):
        if value := source.get("original_max_position_embeddings"):
            return int(value)
    return int(raw["max_position_embeddings"])
