"""How a checkpoint's rotary positions are stretched, read from the several ways in which `config.json` says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError
from .scalars import number, number_or_none, numbers, whole, whole_or_none

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
    theta = number_or_none(scaling, "rope_theta") or theta
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    match rope_type:
        # A dynamic one stretches what is longer than the model's own context, which nothing here is.
        case "default" | "dynamic":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", factor=_factor(scaling))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=_factor(scaling),
                original_max_position_embeddings=whole(scaling, "original_max_position_embeddings"),
                low_freq_factor=number(scaling, "low_freq_factor"),
                high_freq_factor=number(scaling, "high_freq_factor"),
            )
        case "proportional":
            share = number_or_none(scaling, "partial_rotary_factor") or 1.0
            return RopeConfig(theta, "proportional", factor=_factor(scaling, 1.0), turning_share=share)
        case "yarn":
            return _yarn(scaling, theta, raw)
        # Phi-3's first release called it "su".
        case "longrope" | "su":
            return _longrope(scaling, theta, raw)
    raise ModelError(f"unsupported rope scaling {rope_type!r}; supported: {', '.join(ROPE_TYPES)}, dynamic")


def _yarn(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """YaRN (Peng et al., arXiv 2309.00071)."""
    factor, attention_factor = _factor(scaling), number_or_none(scaling, "attention_factor")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=_original_context(scaling, raw),
        attention_factor=_yarn_attention_factor(scaling) if attention_factor is None else attention_factor,
        beta_fast=number_or_none(scaling, "beta_fast") or 32,
        beta_slow=number_or_none(scaling, "beta_slow") or 1,
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """As the factor has it, times `mscale` over `mscale_all_dim` where both are given."""
    growth = 0.1 * math.log(max(1.0, _factor(scaling)))
    above, below = (number_or_none(scaling, name) for name in ("mscale", "mscale_all_dim"))
    return (1 + above * growth) / (1 + below * growth) if above and below else 1 + growth


def _longrope(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """LongRoPE (Ding et al., arXiv 2402.13753), as Phi-3 has it."""
    original = _original_context(scaling, raw)
    factor = _factor(scaling, whole(raw, "max_position_embeddings") / original)
    attention_factor = number_or_none(scaling, "attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factor=numbers(scaling, "short_factor"),
        long_factor=numbers(scaling, "long_factor"),
    )


def _factor(scaling: Mapping[str, Any], default: float | None = None) -> float:
    """How many times as long contexts become; `default` counts where it is left out."""
    found = number(scaling, "factor") if default is None else number_or_none(scaling, "factor")
    if found is None:
        assert default is not None
        return default
    if found <= 0:
        raise ModelError(f"factor must be above 0, as the rope's, not {found}")
    return found


def _original_context(scaling: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """The context that the model was first trained for; Phi-3 says it beside the rope's own fields."""
    for source in (raw, scaling):
        if value := whole_or_none(source, "original_max_position_embeddings"):
            return value
    return whole(raw, "max_position_embeddings")
