"""The threads of some CTAs in lock step: what each has in its registers, and which of them act."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .memory import GlobalMemory, SharedMemory
from .order import Order
from .program import Instruction, Literal, Operand, Parameter, Place, Program, Register, Special
from .values import DTYPES, SIGNED, UNSIGNED, Array, decoded, encoded, width_of

WARP = 32
WARPGROUP = 128
ARGUMENT_BYTES = 8


class DivergenceError(RuntimeError):
    """Threads that have to do something together came to it apart."""


class Threads:
    """active: which of them do the present instruction, None for all; ended: which have returned; agents: who each of
    them is to `order`. parked: which could not do the present instruction, and do it again once they are `woken`.

    All of a CTA lie beside each other. A register that nothing was written to has all bits set.
    """

    def __init__(
        self,
        program: Program,
        ctas: Sequence[tuple[int, int, int]],
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        memory: GlobalMemory,
        order: Order,
        shared_bytes: int,
    ) -> None:
        size = program.num_threads
        self.count = size * len(ctas)
        self.cta_size = size
        self.ctas = np.repeat(np.arange(len(ctas)), size)
        self.memory = memory
        self.shared = SharedMemory(len(ctas), shared_bytes, order)
        self.order = order
        # Of the launch's, which each thread is of; and in which of its warps it is.
        self.programs = np.repeat([x + grid[0] * (y + grid[1] * z) for x, y, z in ctas], size)
        self._warps = np.arange(self.count) % size // WARP
        self.agents = order.agents(self.programs, self._warps)
        self.active: Array | None = None
        self.ended = np.zeros(self.count, bool)
        self.parked: Array | None = None
        self.woken: Array | None = None
        # What was begun and not waited for: see `instructions/copies.py` and `instructions/warpgroups.py`.
        self.copies: list[Any] = []
        # By warp, what it learns of those that have come to an mbarrier once it waits for them itself.
        self.arrived_copies: dict[int, Array] = {}
        self.products: list[Any] = []
        self.committed_copies = np.zeros(self.count, np.int64)
        self.committed_products = np.zeros(self.count, np.int64)
        # By CTA and number, or address: see `instructions/barriers.py`.
        self.named_barriers: dict[tuple[int, int], Any] = {}
        self.phase_barriers: dict[tuple[int, int], Any] = {}
        self._arguments = arguments
        self._registers: dict[tuple[str, int], Array] = {}
        self._literals: dict[tuple[int, str], Array] = {}
        in_cta = np.tile(np.arange(size, dtype=np.uint32), len(ctas))
        self._special = {"%tid.x": in_cta, "%laneid": in_cta % np.uint32(WARP)}
        for axis, name in enumerate("xyz"):
            indices = np.array([cta[axis] for cta in ctas], np.uint32)
            self._special[f"%ctaid.{name}"] = np.repeat(indices, size)
            self._special[f"%nctaid.{name}"] = np.full(self.count, grid[axis], np.uint32)

    def pass_barrier(self, ctas: Array) -> None:
        """All that the threads of these CTAs did is done."""
        self.order.barrier(self.programs[ctas * self.cta_size])
        self.renew_agents()

    def renew_agents(self) -> None:
        """Who the threads are from now on, to those that ask who touched what."""
        self.agents = self.order.agents(self.programs, self._warps)

    def part(self, warp: int) -> tuple[int, int]:
        """The program that a warp, counted over all CTAs, is of, and which of its warps it is."""
        return int(self.programs[warp * WARP]), int(self._warps[warp * WARP])

    def park(self, warps: Iterable[int]) -> None:
        """Those of their threads that act wait where they are."""
        parked = self._or_mask(self.parked, warps)
        self.parked = parked if parked is None or self.active is None else parked & self.active

    def wake(self, warps: Iterable[int]) -> None:
        self.woken = self._or_mask(self.woken, warps)

    def _or_mask(self, held: Array | None, warps: Iterable[int]) -> Array | None:
        chosen = list(warps)
        if not chosen:
            return held
        mask = np.zeros(self.count, bool) if held is None else held
        mask.reshape(-1, WARP)[chosen] = True
        return mask

    def read(self, operand: Operand, kind: str) -> Array:
        """Of every thread: booleans for `pred`, bfloat16 as float32, else numbers of the type."""
        if isinstance(operand, Register) and kind == "pred":
            values = self._held(operand)
            return ~values if operand.is_negated else values
        if isinstance(operand, Literal):
            return self._literal(operand.bits, kind)
        bits = self._bits(operand)
        width = width_of(kind)
        if bits.dtype.itemsize != width:
            bits = bits.astype(UNSIGNED[width])
        return decoded(bits, kind) if kind == "bf16" else bits.view(DTYPES[kind])

    def write(self, register: Operand, values: Array) -> None:
        """Where threads act; signed integers are extended by their sign to wider registers (PTX ISA, 9.4.1)."""
        assert isinstance(register, Register)
        if register.name == "_":
            return
        if register.width == 0:
            bits = values.astype(bool)
        else:
            if values.dtype.itemsize != register.width:
                values = values.astype((SIGNED if values.dtype.kind == "i" else UNSIGNED)[register.width])
            bits = np.ascontiguousarray(values).view(UNSIGNED[register.width])
        assert bits.shape == (self.count,)
        if self.active is not None:
            bits = np.where(self.active, bits, self._held(register))
        self._registers[register.name, register.width] = bits

    def addresses(self, place: Operand, space: str) -> Array:
        """In bytes, of every thread."""
        assert isinstance(place, Place)
        return self.read(place.base, "u32" if space == "shared" else "u64").astype(np.int64) + place.offset

    def argument(self, place: Operand, kind: str) -> Array:
        """One of the kernel's, which lie 8 bytes apart; compilers also choose between their addresses."""
        values = np.zeros(self.count, DTYPES[kind])
        acting = self.acting()
        addresses = self.addresses(place, "param")[acting]
        for address in np.unique(addresses):
            value = np.asarray(self._arguments[address // ARGUMENT_BYTES])
            if address % ARGUMENT_BYTES or value.itemsize != width_of(kind):
                raise ValueError(f"an argument of {value.itemsize} bytes is read as {kind}")
            values[acting[addresses == address]] = value.view(DTYPES[kind])
        return values

    def acting(self) -> Array:
        """Which threads do the present instruction, by their indices."""
        return np.arange(self.count) if self.active is None else np.flatnonzero(self.active)

    def acting_together(self, size: int, instruction: Instruction) -> Array:
        """Which groups of so many threads do it; raises where a part of one does."""
        if self.active is None:
            return np.arange(self.count // size)
        together = (self.active | self.ended).reshape(-1, size)
        acting = self.active.reshape(-1, size).any(1)
        if (acting & ~together.all(1)).any():
            raise DivergenceError(f"not all of {size} threads came to {instruction.text}")
        return np.flatnonzero(acting)

    def _bits(self, operand: Operand) -> Array:
        if isinstance(operand, Register):
            return self._held(operand)
        if isinstance(operand, Parameter):
            return np.full(self.count, operand.index * ARGUMENT_BYTES, np.uint64)
        assert isinstance(operand, Special)
        return self._special[operand.name]

    def _held(self, register: Register) -> Array:
        key = register.name, register.width
        if key not in self._registers:
            dtype = UNSIGNED[register.width] if register.width else bool
            self._registers[key] = np.full(self.count, np.iinfo(dtype).max if register.width else True, dtype)
        return self._registers[key]

    def _literal(self, bits: int, kind: str) -> Array:
        if (bits, kind) not in self._literals:
            self._literals[bits, kind] = self._constant(bits, kind)
        return self._literals[bits, kind]

    def _constant(self, bits: int, kind: str) -> Array:
        if kind == "pred":
            return np.full(self.count, bits != 0)
        width = width_of(kind)
        held = np.full(self.count, bits & ((1 << 8 * width) - 1), UNSIGNED[width])
        return decoded(held, kind) if kind == "bf16" else held.view(DTYPES[kind])


def write_encoded(threads: Threads, register: Operand, numbers: Array, kind: str) -> None:
    """Numbers rounded to `kind`."""
    threads.write(register, encoded(numbers, kind))
