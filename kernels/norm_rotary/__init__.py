"""RMSNorm and rotary position embedding."""

from .reference import apply_rotary, rms_norm, rotary_table

__all__ = ["apply_rotary", "rms_norm", "rotary_table"]
