"""What instructions do, by kind. Sections are the PTX ISA manual's, version 8.7."""

from . import atomics, conversions, copies, floats, integers, matrices, moves, shuffles, warpgroups
from .registry import find

__all__ = [
    "atomics",
    "conversions",
    "copies",
    "find",
    "floats",
    "integers",
    "matrices",
    "moves",
    "shuffles",
    "warpgroups",
]
