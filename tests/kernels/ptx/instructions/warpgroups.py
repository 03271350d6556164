"""Products of a warpgroup, whose factors lie in shared memory (PTX ISA, 9.7.15).

A product is computed as late as it may, when it is waited for: registers and memory that change before are seen.
"""

import re
from dataclasses import dataclass

import numpy as np

from ..program import Instruction, Literal, Operand, UnknownInstructionError
from ..threads import WARPGROUP, Threads
from ..values import Array, decoded
from .matrices import ELEMENT_BYTES, as_sums, fill_left
from .registry import executes

_LANE, _WARP = np.arange(WARPGROUP) % 32, np.arange(WARPGROUP) // 32
# How many bytes lie beside each other before the next row, and which bits of an address are exchanged by which.
_SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}


@dataclass
class Product:
    """One that a warpgroup has begun. group: its how manieth."""

    instruction: Instruction
    warpgroup: int
    group: int
    descriptors: tuple[int, int]
    adds: bool


class Sums:
    """`d = a bᵀ`, or that and `d`, of all warpgroups with the same registers; summed in float64, and rounded once."""

    def __init__(self, num_warpgroups: int) -> None:
        self._products: dict[int, Array] = {}
        self._adds = np.ones(num_warpgroups, bool)
        self._result = ""

    def add(self, threads: Threads, product: Product) -> None:
        warpgroup, self._result = product.warpgroup, product.instruction.modifiers[-3]
        before = self._products.get(warpgroup, 0) if product.adds else 0
        self._adds[warpgroup] &= product.adds
        self._products[warpgroup] = _product(threads, product) + before

    def write(self, threads: Threads, targets: Operand) -> None:
        assert isinstance(targets, tuple)
        warpgroups = sorted(self._products)
        products, adds = np.stack([self._products[each] for each in warpgroups]), self._adds[warpgroups, None]
        threads.active = np.repeat(np.isin(np.arange(len(self._adds)), warpgroups), WARPGROUP)
        for index, target in enumerate(targets):
            row, column = 16 * _WARP + _LANE // 4 + 8 * (index // 2 % 2), 8 * (index // 4) + 2 * (_LANE % 4) + index % 2
            sums = threads.read(target, self._result).reshape(-1, WARPGROUP).copy()
            sums[warpgroups] = as_sums(products[:, row, column] + np.where(adds, sums[warpgroups], 0), self._result)
            threads.write(target, sums.ravel())


@executes("wgmma", modifiers="fence sync aligned")
def order_registers(threads: Threads, instruction: Instruction) -> None:
    """In lock step they are ordered."""
    threads.acting_together(WARPGROUP, instruction)


@executes("wgmma", modifiers="commit_group sync aligned")
def commit(threads: Threads, instruction: Instruction) -> None:
    threads.acting_together(WARPGROUP, instruction)
    threads.committed_products[threads.acting()] += 1


@executes("wgmma", modifiers="wait_group sync aligned")
def wait(threads: Threads, instruction: Instruction) -> None:
    """Until at most so many of the last groups are under way."""
    (newest,) = instruction.operands
    assert isinstance(newest, Literal)
    acting = set(threads.acting_together(WARPGROUP, instruction).tolist())
    waiting, threads.products = threads.products, []
    sums: dict[Operand, Sums] = {}
    for product in waiting:
        arrived = threads.committed_products[product.warpgroup * WARPGROUP] - newest.bits
        if product.warpgroup in acting and product.group < arrived:
            sums.setdefault(product.instruction.operands[0], Sums(threads.count // WARPGROUP)).add(threads, product)
        else:
            threads.products.append(product)
    for targets, each in sums.items():
        each.write(threads, targets)


@executes(
    "wgmma",
    modifiers=" ".join(
        (
            "mma_async sync aligned f32 s32",
            *ELEMENT_BYTES,
            *(f"m64n{8 * n}k{k}" for n in range(1, 33) for k in (16, 32)),
        )
    ),
    types=ELEMENT_BYTES,
)
def begin(threads: Threads, instruction: Instruction) -> None:
    _, left, right, adds, *options = instruction.operands
    signs = options[: 0 if instruction.type == "s8" else 2]
    is_known = instruction.modifiers[-3] == ("s32" if instruction.type == "s8" else "f32")
    if (
        not is_known
        or any(not isinstance(each, Literal) for each in options)
        or signs not in ([], [Literal(1), Literal(1)])
    ):
        raise UnknownInstructionError(instruction.text)
    for warpgroup in threads.acting_together(WARPGROUP, instruction).tolist():
        group = int(threads.committed_products[warpgroup * WARPGROUP])
        left_descriptor = 0 if isinstance(left, tuple) else _same(threads, left, "u64", warpgroup)
        right_descriptor = _same(threads, right, "u64", warpgroup)
        does_add = bool(_same(threads, adds, "pred", warpgroup))
        product = Product(instruction, warpgroup, group, (left_descriptor, right_descriptor), does_add)
        threads.products.append(product)
        # From now on the factors are read.
        for places, element_bytes in _factors(product):
            if places is not None:
                cta, agent = _reader(threads, warpgroup)
                threads.shared.note_read(cta, places, element_bytes, agent)


def _same(threads: Threads, operand: Operand, kind: str, warpgroup: int) -> int:
    """What all threads of a warpgroup have to have."""
    values = _of(threads.read(operand, kind), warpgroup)
    assert (values == values[0]).all()
    return int(values[0])


def _of(values: Array, warpgroup: int) -> Array:
    return values[warpgroup * WARPGROUP : (warpgroup + 1) * WARPGROUP]


def _reader(threads: Threads, warpgroup: int) -> tuple[int, Array]:
    """Its CTA, and who it is together."""
    first = warpgroup * WARPGROUP
    in_cta = first % threads.cta_size // WARPGROUP
    return int(threads.ctas[first]), np.array([threads.order.group_agent(int(threads.programs[first]), in_cta)])


def _factors(product: Product) -> list[tuple[Array | None, int]]:
    """Where both factors lie, [rows, depth], and of how many bytes a number is; the left may lie in registers."""
    _, left, _, _, *options = product.instruction.operands
    shape, _, *kinds = product.instruction.modifiers[-4:]
    columns, depth = map(int, re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())
    transposed = [option == Literal(1) for option in options[2:]]
    left_bytes, right_bytes = (ELEMENT_BYTES[kind] for kind in kinds)
    left_places = None
    if not isinstance(left, tuple):
        left_places = factor_places(product.descriptors[0], (64, depth), left_bytes, transposed[:1] == [True])
    right_places = factor_places(product.descriptors[1], (columns, depth), right_bytes, transposed[-1:] == [True])
    return [(left_places, left_bytes), (right_places, right_bytes)]


def _product(threads: Threads, product: Product) -> Array:
    """[64, columns]"""
    _, left, *_ = product.instruction.operands
    *_, left_kind, right_kind = product.instruction.modifiers
    (left_places, _), (right_places, _) = _factors(product)
    assert right_places is not None
    b = _factor(threads, product.warpgroup, right_places, right_kind)
    if left_places is not None:
        return _factor(threads, product.warpgroup, left_places, left_kind) @ b.T
    assert isinstance(left, tuple)
    warps = np.zeros((threads.count // 32, 16, b.shape[1]))
    fill_left(warps, threads, left, left_kind)
    return warps[4 * product.warpgroup : 4 * product.warpgroup + 4].reshape(64, -1) @ b.T


def _factor(threads: Threads, warpgroup: int, places: Array, kind: str) -> Array:
    cta, agent = _reader(threads, warpgroup)
    return decoded(threads.shared.load(cta, places, ELEMENT_BYTES[kind], agent), kind).astype(np.float64)


def factor_places(descriptor: int, shape: tuple[int, int], element_bytes: int, is_transposed: bool) -> Array:
    """Addresses in shared memory of [rows, depth], or of what is its transpose (PTX ISA, 9.7.15.5.1).

    Eight rows of a swizzle's span are beside each other; a stride on lie the next eight.
    """
    start, leading, stride = (((descriptor >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    assert (descriptor >> 49) & 7 == 0, "a base offset"
    span, exchanged = _SWIZZLES[descriptor >> 62]
    row, depth = np.arange(shape[0])[:, None], np.arange(shape[1])[None, :] * element_bytes
    if not is_transposed:
        # Without a swizzle a row goes on in the next block of 16 bytes; with one it ends in its span.
        beyond = depth // span * leading + depth % span if exchanged == 0 else depth
        places = start + row // 8 * stride + row % 8 * span + beyond
    else:
        if exchanged == 0:
            raise NotImplementedError("a transposed factor without a swizzle")
        along, across = np.arange(shape[0])[:, None] * element_bytes, np.arange(shape[1])[None, :]
        places = start + along // span * leading + along % span + across // 8 * stride + across % 8 * span
    return places ^ (((places >> 7) & exchanged) << 4)
