"""Where sequences have the states that some layers keep instead of keys and values, and how kernels read it."""

from .state_slots import StateSlots

__all__ = ["StateSlots"]
