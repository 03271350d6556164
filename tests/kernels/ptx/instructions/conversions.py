"""Conversions between types (PTX ISA, 9.7.9.21)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import Instruction, UnknownInstructionError
from ..threads import Threads
from ..values import DTYPES, HALVES, INTEGERS, Array, decoded, encoded, flushed, joined, parts
from .moves import read_floats
from .registry import executes

_ROUNDING: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_BYTES = ("e4m3x2", "e5m2x2")
_SCALARS = ("u8", "s8", *INTEGERS, "f16", "bf16", "f32", "f64")


@executes("cvt", modifiers="rn f16x2 bf16x2", types=("f32",))
@executes("cvt", modifiers="rn satfinite e4m3x2 e5m2x2", types=("f32",))
def to_pair(threads: Threads, instruction: Instruction) -> None:
    """Two numbers into one register, the first into its upper half."""
    target, upper, lower = _operands(instruction, 3)
    kind = instruction.modifiers[-2].removesuffix("x2")
    both = np.stack([threads.read(each, "f32") for each in (lower, upper)], 1)
    threads.write(target, joined(encoded(both, kind)))


@executes("cvt", modifiers="rn f16x2", types=_BYTES)
def from_bytes(threads: Threads, instruction: Instruction) -> None:
    """Every 8-bit float is one of 16 bits."""
    target, source = instruction.operands
    numbers = decoded(parts(threads.read(source, "u16"), 1), instruction.type.removesuffix("x2"))
    threads.write(target, joined(encoded(numbers, "f16")))


@executes("cvt", modifiers="rz f16", types=("f32",))
def cut_to_half(threads: Threads, instruction: Instruction) -> None:
    """Towards zero."""
    target, source = _operands(instruction, 2)
    values = threads.read(source, "f32")
    halves = values.astype(np.float16)
    is_farther = np.abs(halves.astype(np.float32)) > np.abs(values)
    threads.write(target, encoded(np.where(is_farther, np.nextafter(halves, np.float16(0)), halves), "f16"))


@executes("cvt", modifiers=" ".join(("rn ftz", *_ROUNDING, *_SCALARS)), types=_SCALARS)
def convert(threads: Threads, instruction: Instruction) -> None:
    """A float that an integer cannot be is the nearest it can, and NaN is 0."""
    target, source = _operands(instruction, 2)
    *roundings, wanted, given = instruction.modifiers
    values = read_floats(threads, source, given)
    if "ftz" in roundings:
        values = flushed(values)
    for rounding in _ROUNDING.keys() & set(roundings):
        values = _ROUNDING[rounding](values)
    if wanted in HALVES:
        threads.write(target, encoded(values, wanted))
    elif values.dtype.kind != "f" or wanted in ("f32", "f64"):
        threads.write(target, values.astype(DTYPES[wanted]))
    elif _ROUNDING.keys() & set(roundings):
        threads.write(target, _whole(values.astype(np.float64), wanted))
    else:
        raise UnknownInstructionError(instruction.text)


def _whole(values: Array, kind: str) -> Array:
    range_ = np.iinfo(DTYPES[kind])
    inside = np.where(np.isnan(values), 0, values)
    # The greatest of 64 bits is no float.
    whole = np.where(inside >= range_.max, 0, np.maximum(inside, range_.min)).astype(DTYPES[kind])
    return np.where(inside >= range_.max, DTYPES[kind](range_.max), whole)


def _operands(instruction: Instruction, count: int) -> tuple[Any, ...]:
    if len(instruction.operands) != count:
        raise UnknownInstructionError(instruction.text)
    return instruction.operands
