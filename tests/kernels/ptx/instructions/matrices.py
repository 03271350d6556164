"""Matrices over the registers of a warp: moved (PTX ISA, 9.7.14.5.15 f.) and multiplied (9.7.14.5)."""

import numpy as np

from ..memory import IllegalAccessError
from ..program import Instruction, Operand, UnknownInstructionError
from ..threads import WARP, Threads
from ..values import Array, decoded, joined, parts
from .registry import executes

# A group of four lanes has a row, and each of them two of its columns.
_GROUP, _IN_GROUP = np.arange(WARP) // 4, np.arange(WARP) % 4
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "e4m3": 1, "e5m2": 1}


@executes("ldmatrix", modifiers="sync aligned m8n8 x1 x2 x4 trans shared", types=("b16",))
def load_matrices(threads: Threads, instruction: Instruction) -> None:
    """Eight rows of eight numbers each, at addresses that eight lanes have."""
    targets, place = instruction.operands
    warps, places = _row_places(threads, instruction, place)
    for index, target in enumerate(_vector(targets)):
        pairs = np.zeros((threads.count // WARP, WARP, 2), np.uint16)
        ctas, agents = (each[warps * WARP][:, None, None] for each in (threads.ctas, threads.agents))
        pairs[warps] = threads.shared.load(ctas, places[:, index], 2, agents)
        threads.write(target, joined(pairs.reshape(-1, 2)))


@executes("stmatrix", modifiers="sync aligned m8n8 x1 x2 x4 trans shared", types=("b16",))
def store_matrices(threads: Threads, instruction: Instruction) -> None:
    place, sources = instruction.operands
    warps, places = _row_places(threads, instruction, place)
    for index, source in enumerate(_vector(sources)):
        pairs = parts(threads.read(source, "u32"), 2).reshape(-1, WARP, 2)[warps]
        ctas, agents = (each[warps * WARP][:, None, None] for each in (threads.ctas, threads.agents))
        threads.shared.store(ctas, places[:, index], pairs, agents)


def _row_places(threads: Threads, instruction: Instruction, place: Operand) -> tuple[Array, Array]:
    """Which warps act, and where the two numbers of each lane lie: [warps, matrices, lanes, 2]."""
    warps = threads.acting_together(WARP, instruction)
    rows = threads.addresses(place, "shared").reshape(-1, 4, 8)[warps]
    count = next(int(each[1]) for each in instruction.modifiers if each in ("x1", "x2", "x4"))
    if (rows[:, :count] % 16).any():
        raise IllegalAccessError("a matrix' row is at no multiple of 16")
    row, column = np.stack([_GROUP, _GROUP], 1), np.stack([2 * _IN_GROUP, 2 * _IN_GROUP + 1], 1)
    if "trans" in instruction.modifiers:
        row, column = column, row
    return warps, rows[:, :count][:, :, row] + 2 * column


@executes(
    "mma",
    modifiers="sync aligned m16n8k16 m16n8k32 row col satfinite f32 f16 bf16 s32 s8 e4m3 e5m2",
    types=("f32", "s32"),
)
def multiply(threads: Threads, instruction: Instruction) -> None:
    """`d = a b + c` in each warp; summed in float64, and rounded once."""
    targets, left, right, addends = (_vector(each) for each in instruction.operands)
    *_, result, left_kind, right_kind, _ = instruction.modifiers
    depth = 32 // ELEMENT_BYTES[left_kind]
    is_known = f"m16n8k{depth}" in instruction.modifiers and result == ("s32" if left_kind == "s8" else "f32")
    if not is_known or ELEMENT_BYTES[right_kind] != ELEMENT_BYTES[left_kind]:
        raise UnknownInstructionError(instruction.text)
    warps = threads.acting_together(WARP, instruction)
    a = np.zeros((threads.count // WARP, 16, depth))
    b = np.zeros((threads.count // WARP, depth, 8))
    fill_left(a, threads, left, left_kind)
    per_lane = depth // 8
    for index, each in enumerate(right):
        numbers = decoded(parts(threads.read(each, "u32"), 4 // per_lane), right_kind).reshape(-1, WARP, per_lane)
        for place in range(per_lane):
            b[:, per_lane * _IN_GROUP + place + 4 * per_lane * index, _GROUP] = numbers[:, :, place]
    products = np.zeros((threads.count // WARP, 16, 8))
    products[warps] = a[warps] @ b[warps]
    for index, (target, addend) in enumerate(zip(targets, addends, strict=True)):
        added = threads.read(addend, result)
        row, column = _GROUP + 8 * (index // 2), 2 * _IN_GROUP + index % 2
        sums = products[:, row, column].reshape(-1) + added
        if "satfinite" in instruction.modifiers:
            sums = np.clip(sums, -(2**31), 2**31 - 1)
        threads.write(target, as_sums(sums, result))


def as_sums(numbers: Array, kind: str) -> Array:
    """Rounded to float32, or wrapped to 32 bits."""
    return numbers.astype(np.float32) if kind == "f32" else numbers.astype(np.int64).astype(np.int32)


def fill_left(matrix: Array, threads: Threads, registers: tuple[Operand, ...], kind: str) -> None:
    """A left factor that lies in registers: [warps, 16, depth] (PTX ISA, figures 71 and 79)."""
    per_lane = 4 // ELEMENT_BYTES[kind]
    for index, each in enumerate(registers):
        numbers = decoded(parts(threads.read(each, "u32"), 4 // per_lane), kind).reshape(-1, WARP, per_lane)
        row = _GROUP + 8 * (index % 2)
        for place in range(per_lane):
            matrix[:, row, per_lane * _IN_GROUP + place + 4 * per_lane * (index // 2)] = numbers[:, :, place]


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)
