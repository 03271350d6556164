"""Arithmetic of floats (PTX ISA, 9.7.3 and 9.7.4).

Approximations (`ex2`, `rsqrt`, `div.full`) are right to the last bit here, and within an ulp or two on a GPU.
"""

import ctypes
import ctypes.util
from collections.abc import Callable

import numpy as np

from ..program import Instruction, Operand
from ..threads import Threads
from ..values import FLOATS, HALVES, PAIRS, Array, encoded, flushed, joined
from .moves import read_floats
from .registry import executes

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, (ctypes.c_double,) * 3
_fused = np.frompyfunc(_libm.fma, 3, 1)

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_LEAST: dict[tuple[str, bool], Callable[[Array, Array], Array]] = {
    ("min", True): np.minimum,
    ("max", True): np.maximum,
    ("min", False): np.fmin,
    ("max", False): np.fmax,
}


@executes("add", "sub", "mul", modifiers="rn ftz", types=FLOATS)
@executes("div", modifiers="rn full approx ftz", types=("f32", "f64"))
def combine(threads: Threads, instruction: Instruction) -> None:
    """Of 16 bits computed in float32, whose bits are more than twice as many: rounded twice is rounded once."""
    target, *operands = instruction.operands
    one, other = (_read(threads, instruction, each) for each in operands)
    _write(threads, instruction, target, _BINARY[instruction.opcode](one, other))


@executes("fma", modifiers="rn ftz", types=FLOATS)
def multiply_and_add(threads: Threads, instruction: Instruction) -> None:
    """Rounded once; in float32 the sum is float64's first, which in one of 500 million is seen."""
    target, *operands = instruction.operands
    one, other, addend = (_read(threads, instruction, each) for each in operands)
    if instruction.type == "f64":
        result = _fused(one, other, addend).astype(np.float64)
    else:
        result = one.astype(np.float64) * other + addend
        result = result.astype(np.float32) if instruction.type == "f32" else result
    _write(threads, instruction, target, result)


@executes("min", "max", modifiers="NaN ftz", types=FLOATS)
def least_or_greatest(threads: Threads, instruction: Instruction) -> None:
    """Of a number and a NaN the number, unless `.NaN` asks for that."""
    target, *operands = instruction.operands
    one, other = (_read(threads, instruction, each) for each in operands)
    choose = _LEAST[instruction.opcode, "NaN" in instruction.modifiers]
    _write(threads, instruction, target, choose(one, other))


@executes("min", "max", modifiers="NaN ftz xorsign abs", types=("f32",))
def least_magnitude(threads: Threads, instruction: Instruction) -> None:
    """`.xorsign.abs`: of magnitudes, with the product's sign (9.7.3.11)."""
    target, *operands = instruction.operands
    one, other = (_read(threads, instruction, each) for each in operands)
    choose = _LEAST[instruction.opcode, "NaN" in instruction.modifiers]
    magnitude = choose(np.abs(one), np.abs(other))
    is_negative = np.signbit(one) ^ np.signbit(other)
    _write(threads, instruction, target, np.where(is_negative, -magnitude, magnitude))


@executes("neg", "abs", modifiers="ftz", types=FLOATS)
def change_sign(threads: Threads, instruction: Instruction) -> None:
    target, source = instruction.operands
    values = _read(threads, instruction, source)
    _write(threads, instruction, target, -values if instruction.opcode == "neg" else np.abs(values))


@executes("ex2", "lg2", "rsqrt", "rcp", "sqrt", modifiers="approx rn ftz", types=("f32",))
def function(threads: Threads, instruction: Instruction) -> None:
    target, source = instruction.operands
    values = _read(threads, instruction, source).astype(np.float64)
    functions: dict[str, Callable[[Array], Array]] = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "sqrt": np.sqrt,
        "rcp": np.reciprocal,
        "rsqrt": lambda each: 1 / np.sqrt(each),
    }
    _write(threads, instruction, target, functions[instruction.opcode](values).astype(np.float32))


def _read(threads: Threads, instruction: Instruction, operand: Operand) -> Array:
    values = read_floats(threads, operand, instruction.type)
    return flushed(values) if "ftz" in instruction.modifiers else values


def _write(threads: Threads, instruction: Instruction, target: Operand, values: Array) -> None:
    kind = instruction.type
    if "ftz" in instruction.modifiers:
        values = flushed(values)
    if kind in PAIRS:
        threads.write(target, joined(encoded(values, kind.removesuffix("x2"))))
    else:
        threads.write(target, encoded(values, kind) if kind in HALVES else values)
