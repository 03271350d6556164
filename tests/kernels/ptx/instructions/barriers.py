"""Where warps of a CTA wait: at barriers with numbers (PTX ISA, 9.7.13.1), and for phases of an mbarrier (9.7.13.15).

Who waits is parked, and woken by who comes last. An mbarrier has its state here and not in the memory it stands in.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..memory import IllegalAccessError
from ..program import Instruction, Operand, UnknownInstructionError
from ..threads import WARP, Threads
from ..values import Array
from .registry import executes

_MBARRIER_BYTES = 8


class BarrierError(RuntimeError):
    """A barrier is used as it must not be."""


@dataclass
class NamedBarrier:
    """num_threads: that it is for, 0 for all; told: what those who came know; passing: warps that are yet to go on."""

    num_threads: int
    num_arrived: int = 0
    told: Array | int = -1
    waiting: set[int] = field(default_factory=set)
    passing: set[int] = field(default_factory=set)


@dataclass
class PhaseBarrier:
    """told: what those know who have arrived in this phase; done: what those knew who did in the one before."""

    expected: int
    pending: int
    phase: int = 0
    told: Array | int = -1
    done: Array | int = -1
    waiting: set[int] = field(default_factory=set)


@executes("bar", "barrier", modifiers="sync arrive aligned cta")
def meet(threads: Threads, instruction: Instruction) -> None:
    """Warps come from anywhere; but those of a whole CTA are to come to one `bar.sync`, or would wait in vain."""
    operand, *count = instruction.operands
    if instruction.opcode == "bar" and "sync" in instruction.modifiers and not count:
        threads.pass_barrier(threads.acting_together(threads.cta_size, instruction))
        return
    warps = threads.acting_together(WARP, instruction).tolist()
    numbers = threads.read(operand, "u32")
    counts = threads.read(count[0], "u32") if count else np.zeros(threads.count, np.uint32)
    does_wait = "sync" in instruction.modifiers
    staying: set[int] = set()
    for warp in warps:
        thread = warp * WARP
        key, num_threads = (int(threads.ctas[thread]), int(numbers[thread])), int(counts[thread])
        barrier = threads.named_barriers.setdefault(key, NamedBarrier(num_threads))
        if warp in barrier.passing:
            barrier.passing.remove(warp)
            continue
        if barrier.num_arrived == 0:
            barrier.num_threads = num_threads
        if barrier.num_threads != num_threads or num_threads % WARP:
            raise BarrierError(f"a barrier of {barrier.num_threads} threads is one of {num_threads}")
        barrier.num_arrived += WARP
        barrier.told = np.maximum(barrier.told, threads.order.release(*threads.part(warp)))
        if does_wait:
            barrier.waiting.add(warp)
            staying.add(warp)
        here = staying & _open(threads, key[0], barrier)
        staying -= here
        barrier.passing -= here
    threads.park(staying)
    threads.renew_agents()


def _open(threads: Threads, cta: int, barrier: NamedBarrier) -> set[int]:
    """Those who need not wait on, where all have come; who has returned is not waited for."""
    of_cta = threads.ended[cta * threads.cta_size : (cta + 1) * threads.cta_size]
    if barrier.num_arrived < (barrier.num_threads or len(of_cta) - int(of_cta.sum())):
        return set()
    opened, told = barrier.waiting, barrier.told
    assert isinstance(told, np.ndarray)
    for warp in opened:
        threads.order.acquire(*threads.part(warp), told)
    threads.wake(opened)
    barrier.passing |= opened
    barrier.num_arrived, barrier.told, barrier.waiting = 0, -1, set()
    return opened


def open_for_the_rest(threads: Threads) -> None:
    """Barriers that were waiting for who has returned since."""
    for (cta, _), barrier in threads.named_barriers.items():
        if barrier.waiting:
            _open(threads, cta, barrier)
    threads.renew_agents()


@executes("mbarrier", modifiers="init shared shared::cta b64")
def begin_phases(threads: Threads, instruction: Instruction) -> None:
    place, count = instruction.operands
    counts = threads.read(count, "u32")
    for key, acting in places_of(threads, place):
        threads.shared.note_write(key[0], np.array([key[1]]), _MBARRIER_BYTES, threads.agents[acting[:1]])
        expected = int(counts[acting[0]])
        threads.phase_barriers[key] = PhaseBarrier(expected, expected)


@executes("mbarrier", modifiers="inval shared shared::cta b64")
def end_phases(threads: Threads, instruction: Instruction) -> None:
    (place,) = instruction.operands
    for key, acting in places_of(threads, place):
        phase_barrier(threads, key)
        threads.shared.note_write(key[0], np.array([key[1]]), _MBARRIER_BYTES, threads.agents[acting[:1]])
        del threads.phase_barriers[key]


@executes("mbarrier", modifiers="arrive release cta shared shared::cta b64")
def arrive(threads: Threads, instruction: Instruction) -> None:
    """Whoever waits for the phase learns what a thread's warp knows."""
    state, place, *count = instruction.operands
    if getattr(state, "name", "") != "_":
        raise UnknownInstructionError(instruction.text)
    counts = threads.read(count[0], "u32") if count else np.ones(threads.count, np.uint32)
    for key, acting in places_of(threads, place):
        note_use(threads, key, acting)
        told = threads.order.release(*threads.part(acting[0] // WARP))
        count_down(threads, key, int(counts[acting].sum()), told)
    threads.renew_agents()


@executes("mbarrier", modifiers="try_wait test_wait parity acquire cta shared shared::cta b64")
def wait_for_phase(threads: Threads, instruction: Instruction) -> None:
    """Of this parity. It is as long a try as it takes, in `test_wait` too: false is never the answer."""
    if "parity" not in instruction.modifiers or len(instruction.operands) != 3:
        raise UnknownInstructionError(instruction.text)
    target, place, parity = instruction.operands
    parities = threads.read(parity, "u32")
    done = np.zeros(threads.count, bool)
    for key, acting in places_of(threads, place):
        barrier, warp = phase_barrier(threads, key), int(acting[0] // WARP)
        if barrier.phase % 2 == parities[acting[0]]:
            barrier.waiting.add(warp)
            threads.park([warp])
            continue
        note_use(threads, key, acting)
        if isinstance(barrier.done, np.ndarray):
            threads.order.acquire(*threads.part(warp), barrier.done)
        done[acting] = True
    threads.active = done
    threads.write(target, done)
    threads.renew_agents()


def phase_barrier(threads: Threads, key: tuple[int, int]) -> PhaseBarrier:
    """That of a CTA at an address."""
    if key not in threads.phase_barriers:
        raise IllegalAccessError(f"there is no mbarrier at byte {key[1]} of shared memory")
    return threads.phase_barriers[key]


def count_down(threads: Threads, key: tuple[int, int], count: int, told: Array) -> None:
    """So many arrivals; the last of a phase wakes those that wait for it."""
    barrier = phase_barrier(threads, key)
    if count > barrier.pending:
        raise BarrierError(f"more arrive at the mbarrier at byte {key[1]} than it is for")
    barrier.pending -= count
    barrier.told = np.maximum(barrier.told, told)
    if barrier.pending == 0:
        barrier.phase, barrier.pending = barrier.phase + 1, barrier.expected
        barrier.done, barrier.told = barrier.told, -1
        threads.wake(barrier.waiting)
        barrier.waiting = set()


def note_use(threads: Threads, key: tuple[int, int], acting: Array) -> None:
    """It has to be there already, for all that is known."""
    cta, address = key
    threads.shared.note_update(cta, np.array([address]), _MBARRIER_BYTES, threads.agents[acting[:1]])


def places_of(threads: Threads, place: Operand) -> Iterator[tuple[tuple[int, int], Array]]:
    """CTA and address, and the threads of one warp that name it."""
    acting = threads.acting()
    addresses = threads.addresses(place, "shared")[acting]
    for warp in np.unique(acting // WARP):
        of_warp = acting // WARP == warp
        for address in np.unique(addresses[of_warp]).tolist():
            chosen = acting[of_warp & (addresses == address)]
            yield (int(threads.ctas[chosen[0]]), address), chosen


@executes("setmaxnreg", modifiers="inc dec sync aligned", types=("u32",))
def change_registers(threads: Threads, instruction: Instruction) -> None:
    """There are as many as it takes."""
    threads.acting_together(WARP, instruction)
