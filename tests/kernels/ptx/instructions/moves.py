"""Moves, selections, loads and stores (PTX ISA, 9.7.9), and comparisons (9.7.5)."""

from collections.abc import Callable

import numpy as np

from ..memory import IllegalAccessError
from ..program import Instruction, Operand
from ..threads import Threads
from ..values import BITS, DTYPES, HALVES, INTEGERS, PAIRS, UNSIGNED, Array, decoded, joined, parts, width_of
from .registry import executes

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_MEMORY_TYPES = ("b8", "u8", "s8", *INTEGERS, *BITS, "f32", "f64")


@executes("mov", types=("pred", "f32", "f64", *INTEGERS, *BITS))
def move(threads: Threads, instruction: Instruction) -> None:
    """Also packs registers into one, and unpacks one."""
    target, source = instruction.operands
    kind = instruction.type
    if isinstance(target, tuple):
        pieces = parts(threads.read(source, kind), width_of(kind) // len(target))
        for index, each in enumerate(target):
            threads.write(each, pieces[:, index])
    elif isinstance(source, tuple):
        piece = f"u{8 * width_of(kind) // len(source)}"
        threads.write(target, joined(np.stack([threads.read(each, piece) for each in source], 1)))
    else:
        threads.write(target, threads.read(source, kind))


@executes("selp", types=("f32", "f64", *INTEGERS, *BITS))
def select(threads: Threads, instruction: Instruction) -> None:
    target, one, other, chooses = instruction.operands
    kind = instruction.type
    threads.write(target, np.where(threads.read(chooses, "pred"), threads.read(one, kind), threads.read(other, kind)))


@executes("setp", modifiers="eq ne lt le gt ge", types=(*INTEGERS, *BITS))
def compare_integers(threads: Threads, instruction: Instruction) -> None:
    target, one, other = instruction.operands
    comparison, kind = instruction.modifiers
    threads.write(target, _COMPARISONS[comparison](threads.read(one, kind), threads.read(other, kind)))


@executes(
    "setp",
    modifiers="eq ne lt le gt ge equ neu ltu leu gtu geu nan num",
    types=("f32", "f64", *HALVES, *PAIRS),
)
def compare_floats(threads: Threads, instruction: Instruction) -> None:
    """With a NaN: false, or true where the comparison's name ends in u (9.7.5, table 28)."""
    target, one, other = instruction.operands
    comparison, kind = instruction.modifiers
    x, y = read_floats(threads, one, kind), read_floats(threads, other, kind)
    is_nan = np.isnan(x) | np.isnan(y)
    if comparison == "nan":
        holds = is_nan
    elif comparison == "num":
        holds = ~is_nan
    elif comparison in _COMPARISONS:
        holds = _COMPARISONS[comparison](x, y) & ~is_nan
    else:
        holds = _COMPARISONS[comparison[:-1]](x, y) | is_nan
    for index, each in enumerate(target if isinstance(target, tuple) else (target,)):
        threads.write(each, holds[:, index] if holds.ndim == 2 else holds)


def read_floats(threads: Threads, operand: Operand, kind: str) -> Array:
    """[threads], or [threads, 2] of two in a register; those of 16 bits as float32."""
    if kind in PAIRS:
        return decoded(parts(threads.read(operand, "u32"), 2), kind.removesuffix("x2"))
    if kind in HALVES:
        return decoded(threads.read(operand, "u16"), kind)
    return threads.read(operand, kind)


@executes("ld", modifiers="param", types=_MEMORY_TYPES)
def load_argument(threads: Threads, instruction: Instruction) -> None:
    target, place = instruction.operands
    threads.write(target, threads.argument(place, instruction.type))


@executes("ld", modifiers="global shared v2 v4", types=_MEMORY_TYPES)
def load(threads: Threads, instruction: Instruction) -> None:
    targets, place = instruction.operands
    targets = targets if isinstance(targets, tuple) else (targets,)
    space, kind = instruction.modifiers[0], instruction.type
    width, acting = width_of(kind), threads.acting()
    addresses = threads.addresses(place, space)[acting]
    if space == "global":
        loaded = threads.memory.load(addresses, width, len(targets), threads.agents[acting])
    else:
        _check_vector(addresses, width * len(targets))
        each = addresses[:, None] + width * np.arange(len(targets))
        loaded = threads.shared.load(threads.ctas[acting, None], each, width, threads.agents[acting, None])
    values = np.zeros((threads.count, len(targets)), UNSIGNED[width])
    values[acting] = loaded
    for index, target in enumerate(targets):
        threads.write(target, np.ascontiguousarray(values[:, index]).view(DTYPES[kind]))


@executes("st", modifiers="global shared v2 v4", types=_MEMORY_TYPES)
def store(threads: Threads, instruction: Instruction) -> None:
    place, sources = instruction.operands
    sources = sources if isinstance(sources, tuple) else (sources,)
    space, width = instruction.modifiers[0], width_of(instruction.type)
    acting = threads.acting()
    addresses = threads.addresses(place, space)[acting]
    values = np.stack([threads.read(source, f"u{8 * width}")[acting] for source in sources], 1)
    if space == "global":
        threads.memory.store(addresses, values, threads.agents[acting])
    else:
        _check_vector(addresses, width * len(sources))
        each = addresses[:, None] + width * np.arange(len(sources))
        threads.shared.store(threads.ctas[acting, None], each, values, threads.agents[acting, None])


def _check_vector(addresses: Array, size: int) -> None:
    if (addresses % size).any():
        raise IllegalAccessError(f"a shared address is no multiple of {size}")
