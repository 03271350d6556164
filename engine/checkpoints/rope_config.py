"""How a checkpoint's rotary positions are stretched, read from the several ways in which `config.json` says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError, shown
from .scalars import Section, whole, whole_or_none

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


def rope_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `config.json` says of positions: `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def rope_place(raw: Mapping[str, Any]) -> str:
    """Where a `config.json` has that, for errors: a model with images within what it says of its decoder."""
    for within, fields in (("text_config.", raw.get("text_config") or {}), ("", raw)):
        for name in ("rope_parameters", "rope_scaling"):
            if fields.get(name):
                return f"{within}{name}."
    return ""


def read_rope(scaling: Mapping[str, Any], theta: float, raw: Mapping[str, Any], kind: str = "") -> RopeConfig:
    """One rope of a model: `scaling` is its `rope_parameters` or `rope_scaling`, `raw` the whole `config.json`.

    `theta` counts where `scaling` has none. `kind`: of the layers that it is for, where `scaling` stands below that.
    Raises `ModelError` for a type that is not in `ROPE_TYPES`, `KeyError` for a field that its type needs.
    """
    within = rope_place(raw) + kind
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{within.rstrip('.')} must be a JSON object, not {shown(scaling)}")
    rope = Section(scaling, within)
    theta = rope.number_or_none("rope_theta") or theta
    field = "rope_type" if rope.get("rope_type") else "type"
    rope_type = rope.get(field) or "default"
    match rope_type:
        # A dynamic one stretches what is longer than the model's own context, which nothing here is.
        case "default" | "dynamic":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", factor=rope.above_zero("factor"))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                factor=rope.above_zero("factor"),
                original_max_position_embeddings=rope.whole("original_max_position_embeddings"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case "proportional":
            share = rope.number_or_none("partial_rotary_factor") or 1.0
            return RopeConfig(theta, "proportional", factor=_factor_or(rope, 1.0), turning_share=share)
        case "yarn":
            return _yarn(rope, theta, raw)
        # Phi-3's first release called it "su".
        case "longrope" | "su":
            return _longrope(rope, theta, raw)
    raise ModelError(f"unsupported {within}{field} {rope_type!r}; supported: {', '.join(ROPE_TYPES)}, dynamic")


def _yarn(rope: Section, theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """YaRN (Peng et al., arXiv 2309.00071)."""
    attention_factor = rope.number_or_none("attention_factor")
    return RopeConfig(
        theta,
        "yarn",
        factor=rope.above_zero("factor"),
        original_max_position_embeddings=_original_context(rope, raw),
        attention_factor=_yarn_attention_factor(rope) if attention_factor is None else attention_factor,
        beta_fast=rope.number_or_none("beta_fast") or 32,
        beta_slow=rope.number_or_none("beta_slow") or 1,
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Section) -> float:
    """As the factor has it, times `mscale` over `mscale_all_dim` where both are given."""
    growth = 0.1 * math.log(max(1.0, rope.above_zero("factor")))
    above, below = (rope.number_or_none(name) for name in ("mscale", "mscale_all_dim"))
    return (1 + above * growth) / (1 + below * growth) if above and below else 1 + growth


def _longrope(rope: Section, theta: float, raw: Mapping[str, Any]) -> RopeConfig:
    """LongRoPE (Ding et al., arXiv 2402.13753), as Phi-3 has it."""
    original = _original_context(rope, raw)
    factor = _factor_or(rope, whole(raw, "max_position_embeddings") / original)
    attention_factor = rope.number_or_none("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )


def _factor_or(rope: Section, default: float) -> float:
    """How many times as long contexts become; `default` counts where it is left out, or null."""
    return default if rope.number_or_none("factor") is None else rope.above_zero("factor")


def _original_context(rope: Section, raw: Mapping[str, Any]) -> int:
    """The context that the model was first trained for; Phi-3 says it beside the rope's own fields."""
    name = "original_max_position_embeddings"
    return whole_or_none(raw, name) or rope.whole_or_none(name) or whole(raw, "max_position_embeddings")
