"""Which layers see only the latest tokens, and how many, as a `config.json` says it. Free of torch."""

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ModelError
from ..scalars import whole, whole_or_none


def sliding_layers(raw: Mapping[str, Any], is_sliding: Callable[[int], bool]) -> tuple[bool, ...]:
    """One entry a layer: as `layer_types` says, or by the family's rule where it is left out."""
    num_layers = whole(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    if not kinds:
        return tuple(map(is_sliding, range(num_layers)))
    if len(kinds) != num_layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return tuple(kind == "sliding_attention" for kind in kinds)


def read_windows(raw: Mapping[str, Any], is_sliding: tuple[bool, ...]) -> tuple[int | None, ...]:
    """One entry a layer: how many of the latest tokens it attends to; None where it attends to all."""
    width = whole_or_none(raw, "sliding_window") or 0
    if width < 0:
        raise ModelError(f"sliding_window must be at least 1, or null, not {width}")
    return tuple(width if sliding and width else None for sliding in is_sliding)


def qwen_windows(raw: Mapping[str, Any], is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Qwen names a window in every config and says beside it whether it counts."""
    used = bool(raw.get("use_sliding_window", False))
    return read_windows(raw, sliding_layers(raw, is_sliding) if used else (False,) * whole(raw, "num_hidden_layers"))
