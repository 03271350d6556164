"""What is looked for in kernels' PTX."""

import re

# A product and the sum that rounds it to a whole number as one instruction, which rounds once: not as the reference.
_FUSED_ROUNDING = r"fma\.rn\.f32[^;]*0f4B400000"
# What a kernel that begins while the one before it runs waits with, and what it must not do before.
_WAITS, _TOUCHES = "griddepcontrol.wait", r"\b(ld|st|atom|red|cp\.async\S*)\S*\.global"


def fuses_rounding(ptx: str) -> bool:
    return re.search(_FUSED_ROUNDING, ptx) is not None


def cuts_float32(ptx: str) -> bool:
    """Whether its products take of float32 what TF32 has."""
    return "tf32" in ptx


def waits_first(ptx: str) -> bool:
    """Whether it waits for the kernels before it, and touches no memory until then."""
    before, waits, _ = ptx.partition(_WAITS)
    return bool(waits) and re.search(_TOUCHES, before) is None


def waits_at_end(ptx: str) -> bool:
    """Whether it waits for the kernels before it, and touches no memory from then on."""
    _, waits, after = ptx.partition(_WAITS)
    return bool(waits) and re.search(_TOUCHES, after) is None
