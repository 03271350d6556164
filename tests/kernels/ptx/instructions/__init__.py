"""What instructions do, by kind. Sections are the PTX ISA manual's, version 8.7."""

from ..threads import Threads
from . import atomics, barriers, conversions, copies, floats, integers, matrices, moves, shuffles, warpgroups
from .registry import find

__all__ = [
    "atomics",
    "barriers",
    "conversions",
    "copies",
    "find",
    "floats",
    "integers",
    "matrices",
    "moves",
    "settle",
    "shuffles",
    "warpgroups",
]


def settle(threads: Threads) -> None:
    """Nobody can go on: what was put off for as long as can be takes place now, until it wakes somebody."""
    while threads.woken is None and copies.arrive_first(threads):
        pass
    if threads.woken is None:
        barriers.open_for_the_rest(threads)
