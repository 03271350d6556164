"""Arithmetic and logic of integers (PTX ISA, 9.7.1 and 9.7.8)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..program import Instruction
from ..threads import Threads
from ..values import BITS, DTYPES, INTEGERS, SIGNED, UNSIGNED, Array, joined, parts, width_of
from .registry import executes

_NARROW = ("u16", "s16", "u32", "s32")
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@executes("add", "sub", "min", "max", types=INTEGERS)
@executes("and", "or", "xor", types=("pred", *BITS))
def combine(threads: Threads, instruction: Instruction) -> None:
    """Sums and differences wrap."""
    target, one, other = instruction.operands
    kind = instruction.type
    threads.write(target, _BINARY[instruction.opcode](threads.read(one, kind), threads.read(other, kind)))


@executes("mul", modifiers="lo", types=INTEGERS)
@executes("mad", modifiers="lo", types=INTEGERS)
def multiply_low(threads: Threads, instruction: Instruction) -> None:
    target, *factors = instruction.operands
    kind = instruction.type
    one, other, *addend = (threads.read(each, kind) for each in factors)
    threads.write(target, one * other + addend[0] if addend else one * other)


@executes("mul", "mad", modifiers="wide", types=_NARROW)
def multiply_wide(threads: Threads, instruction: Instruction) -> None:
    """The product has twice the bits, and so has what is added."""
    target, one, other, *addend = instruction.operands
    product = _wide_product(threads, one, other, instruction.type)
    for each in addend:
        product = product + threads.read(each, f"{instruction.type[0]}{8 * product.dtype.itemsize}")
    threads.write(target, product)


@executes("mul", modifiers="hi", types=_NARROW)
def multiply_high(threads: Threads, instruction: Instruction) -> None:
    target, one, other = instruction.operands
    product = _wide_product(threads, one, other, instruction.type)
    high = product >> product.dtype.type(8 * width_of(instruction.type))
    threads.write(target, high.astype(DTYPES[instruction.type]))


def _wide_product(threads: Threads, one: Any, other: Any, kind: str) -> Array:
    wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * width_of(kind)]
    return threads.read(one, kind).astype(wide) * threads.read(other, kind).astype(wide)


@executes("div", "rem", types=INTEGERS)
def divide(threads: Threads, instruction: Instruction) -> None:
    """Towards zero, and a remainder has the dividend's sign; by zero all bits are set."""
    target, *operands = instruction.operands
    dividend, divisor = (threads.read(each, instruction.type) for each in operands)
    unsigned = UNSIGNED[width_of(instruction.type)]
    # The magnitude of the least integer is one of an unsigned one.
    magnitude, by = (np.abs(each).view(unsigned) for each in (dividend, divisor))
    nonzero = np.maximum(by, 1)
    if instruction.opcode == "div":
        result, is_negative = magnitude // nonzero, (dividend < 0) != (divisor < 0)
    else:
        result, is_negative = magnitude % nonzero, dividend < 0
    signed = np.where(is_negative, ~result + unsigned(1), result)
    threads.write(target, np.where(by == 0, ~unsigned(0), signed).astype(unsigned))


@executes("neg", types=("s16", "s32", "s64"))
@executes("not", types=("pred", *BITS))
def invert(threads: Threads, instruction: Instruction) -> None:
    target, source = instruction.operands
    values = threads.read(source, instruction.type)
    threads.write(target, -values if instruction.opcode == "neg" else ~values)


@executes("abs", types=("s16", "s32", "s64"))
def magnitude(threads: Threads, instruction: Instruction) -> None:
    target, source = instruction.operands
    threads.write(target, np.abs(threads.read(source, instruction.type)))


@executes("shl", types=BITS)
@executes("shr", types=(*INTEGERS, *BITS))
def shift(threads: Threads, instruction: Instruction) -> None:
    """By more than there are bits: as by so many."""
    target, source, by = instruction.operands
    values, kind = threads.read(source, instruction.type), instruction.type
    bits = 8 * width_of(kind)
    amount = threads.read(by, "u32")
    within = np.minimum(amount, bits - 1).astype(values.dtype)
    shifted = values << within if instruction.opcode == "shl" else values >> within
    if instruction.opcode == "shl" or kind[0] != "s":
        shifted = np.where(amount >= bits, 0, shifted).astype(values.dtype)
    threads.write(target, shifted)


@executes("shf", modifiers="l r wrap clamp", types=("b32",))
def shift_two(threads: Threads, instruction: Instruction) -> None:
    """Of two registers side by side, the upper's bits when shifted left and the lower's when right (9.7.8.7)."""
    target, low, high, by = instruction.operands
    direction, mode, _ = instruction.modifiers
    amount = threads.read(by, "u32").astype(np.uint64)
    amount = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
    both = threads.read(high, "b32").astype(np.uint64) << np.uint64(32) | threads.read(low, "b32")
    shifted = (both << amount) >> np.uint64(32) if direction == "l" else both >> amount
    threads.write(target, shifted.astype(np.uint32))


@executes("bfe", types=("u32", "s32"))
def extract_bits(threads: Threads, instruction: Instruction) -> None:
    """`length` bits from `begin` on; of a signed one the highest of them, or of the register's, is the sign's."""
    target, source, *range_ = instruction.operands
    begin, length = (threads.read(each, "u32").astype(np.int64) & 0xFF for each in range_)
    # What is beyond the register is zero, or its sign.
    values = threads.read(source, instruction.type).astype(np.int64)
    wide = values >> np.minimum(begin, 63)
    length = np.minimum(length, 32)
    extracted = wide & ((1 << length) - 1)
    if instruction.type == "s32":
        is_negative = (length > 0) & ((extracted >> np.maximum(length - 1, 0)) & 1 == 1)
        extracted = np.where(is_negative, extracted - (1 << length), extracted)
    threads.write(target, extracted.astype(np.int32))


@executes("bfi", types=("b32", "b64"))
def insert_bits(threads: Threads, instruction: Instruction) -> None:
    """The lowest `length` bits, in place of as many from `begin` on; what does not fit is left out."""
    target, source, into, *range_ = instruction.operands
    kind = instruction.type
    begin, length = (threads.read(each, "u32") & np.uint32(0xFF) for each in range_)
    values, held = threads.read(source, kind), threads.read(into, kind)
    bits = 8 * width_of(kind)
    place = np.arange(bits)
    inserted = np.where((place >= begin[:, None]) & (place < (begin + length)[:, None]), 1, 0)
    mask = np.bitwise_or.reduce(inserted.astype(values.dtype) << place.astype(values.dtype), axis=1)
    moved = np.where(begin < bits, values << np.minimum(begin, bits - 1).astype(values.dtype), 0)
    threads.write(target, ((held & ~mask) | (moved & mask)).astype(values.dtype))


@executes("popc", types=("b32", "b64"))
def count_bits(threads: Threads, instruction: Instruction) -> None:
    target, source = instruction.operands
    bits = np.unpackbits(parts(threads.read(source, instruction.type), 1), axis=1)
    threads.write(target, bits.sum(1, dtype=np.uint32))


@executes("prmt", types=("b32",))
def permute_bytes(threads: Threads, instruction: Instruction) -> None:
    """Each of four bytes is one of eight, or with a selector of 8 and more that one's sign (9.7.9.7)."""
    target, low, high, selector = instruction.operands
    eight = np.concatenate([parts(threads.read(each, "u32"), 1) for each in (low, high)], 1)
    selectors = (threads.read(selector, "u32")[:, None] >> (4 * np.arange(4, dtype=np.uint32))) & np.uint32(15)
    chosen = np.take_along_axis(eight, (selectors & np.uint32(7)).astype(np.int64), 1)
    signs = np.where(chosen & 0x80, 0xFF, 0)
    threads.write(target, joined(np.where(selectors & np.uint32(8), signs, chosen).astype(np.uint8)))
