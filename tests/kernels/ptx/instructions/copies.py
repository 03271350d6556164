"""Copies from global to shared memory that go on beside the threads (PTX ISA, 9.7.9.25).

A copy arrives as late as it may, when it is waited for, or nobody can go on without it; until then its place holds NaN.
So who reads too early, or has copied over what is yet to be read, sees it.
"""

from dataclasses import dataclass

import numpy as np

from ..memory import IllegalAccessError
from ..program import Instruction, Literal
from ..threads import WARP, Threads
from ..values import Array
from .barriers import count_down, note_use, phase_barrier, places_of
from .registry import executes


@dataclass
class Copy:
    """What threads have begun: a row a thread. group: the thread's how manieth. agents: whom it is known of by an
    mbarrier, or nobody: then it is the thread itself, once it has waited.
    """

    threads: Array
    targets: Array
    sources: Array
    source_sizes: Array
    groups: Array
    agents: Array
    size: int

    def chosen(self, rows: Array) -> "Copy":
        arrays = (self.threads, self.targets, self.sources, self.source_sizes, self.groups, self.agents)
        threads, targets, sources, sizes, groups, agents = (each[rows] for each in arrays)
        return Copy(threads, targets, sources, sizes, groups, agents, self.size)


@dataclass
class Arrival:
    """At mbarriers, once what each thread has begun before is there. told: what is learnt from each warp's."""

    threads: Array
    addresses: Array
    told: dict[int, Array]

    def chosen(self, rows: Array) -> "Arrival":
        return Arrival(self.threads[rows], self.addresses[rows], self.told)


@executes("cp", modifiers="async ca cg shared global")
def begin(threads: Threads, instruction: Instruction) -> None:
    """What is beyond the source's size is zero."""
    target, source, size, *source_size = instruction.operands
    assert isinstance(size, Literal)
    acting = threads.acting()
    sizes = threads.read(source_size[0] if source_size else size, "u32").astype(np.int64)
    targets, sources = threads.addresses(target, "shared"), threads.addresses(source, "global")
    given = (acting, targets[acting], sources[acting], sizes[acting], threads.committed_copies[acting])
    copy = Copy(*given, np.zeros(len(acting), np.int64), size.bits)
    if (copy.targets % copy.size).any() or (copy.sources % copy.size)[copy.source_sizes > 0].any():
        raise IllegalAccessError(f"an address is no multiple of {copy.size}")
    nothing = np.full((len(acting), copy.size // 4), 0xFFFFFFFF, np.uint32)
    _write_words(threads, copy, nothing, threads.agents[acting])
    threads.copies.append(copy)


@executes("cp", modifiers="async commit_group")
def commit(threads: Threads, instruction: Instruction) -> None:
    threads.committed_copies[threads.acting()] += 1


@executes("cp", modifiers="async wait_group wait_all")
def wait(threads: Threads, instruction: Instruction) -> None:
    """Until at most so many of a thread's last groups are under way."""
    acting = np.zeros(threads.count, bool)
    acting[threads.acting()] = True
    if instruction.modifiers[-1] == "wait_all":
        arrived = np.full(threads.count, np.iinfo(np.int64).max)
    else:
        (newest,) = instruction.operands
        arrived = threads.committed_copies - threads.read(newest, "u32").astype(np.int64)
    is_waiting = np.zeros(threads.count, bool)
    waiting, threads.copies = threads.copies, []
    for begun in waiting:
        if isinstance(begun, Copy):
            is_due = acting[begun.threads] & (begun.groups < arrived[begun.threads])
            is_waiting[begun.threads[~is_due]] = True
        else:
            is_due = acting[begun.threads] & ~is_waiting[begun.threads]
        _divide(threads, begun, is_due)
    for warp in threads.arrived_copies.keys() & set((threads.acting() // WARP).tolist()):
        threads.order.acquire(*threads.part(warp), threads.arrived_copies.pop(warp))
    threads.renew_agents()


@executes("cp", modifiers="async mbarrier arrive noinc shared shared::cta", types=("b64",))
def arrive(threads: Threads, instruction: Instruction) -> None:
    """Without `noinc` one more arrival is awaited in this phase."""
    (place,) = instruction.operands
    acting, addresses = threads.acting(), threads.addresses(place, "shared")
    told: dict[int, Array] = {}
    agents = np.zeros(threads.count, np.int64)
    for key, of_warp in places_of(threads, place):
        note_use(threads, key, of_warp)
        if "noinc" not in instruction.modifiers:
            phase_barrier(threads, key).pending += len(of_warp)
    for warp in np.unique(acting // WARP).tolist():
        agents[warp * WARP : (warp + 1) * WARP], told[warp] = threads.order.copies_agent(*threads.part(warp))
    threads.renew_agents()
    is_acting = np.zeros(threads.count, bool)
    is_acting[acting] = True
    for begun in threads.copies:
        if isinstance(begun, Copy):
            is_new = is_acting[begun.threads] & (begun.agents == 0)
            begun.agents[is_new] = agents[begun.threads[is_new]]
    threads.copies.append(Arrival(acting, addresses[acting], told))


def arrive_first(threads: Threads) -> bool:
    """The first arrival that is under way takes place, if there is one, and the copies before."""
    first = next((index for index, begun in enumerate(threads.copies) if isinstance(begun, Arrival)), None)
    if first is None:
        return False
    is_arriving = np.zeros(threads.count, bool)
    is_arriving[threads.copies[first].threads] = True
    under_way, threads.copies = threads.copies, []
    for begun in under_way[: first + 1]:
        _divide(threads, begun, is_arriving[begun.threads])
    threads.copies += under_way[first + 1 :]
    return True


def _divide(threads: Threads, begun: Copy | Arrival, is_due: Array) -> None:
    """What is due takes place, and the rest is kept."""
    if is_due.any():
        due = begun.chosen(is_due)
        if isinstance(due, Copy):
            _copy(threads, due)
        else:
            _arrive(threads, due)
    if not is_due.all():
        threads.copies.append(begun.chosen(~is_due))


def _arrive(threads: Threads, due: Arrival) -> None:
    for warp, told in due.told.items():
        of_warp = due.threads // WARP == warp
        addresses, counts = np.unique(due.addresses[of_warp], return_counts=True)
        threads.arrived_copies[warp] = told
        for address, count in zip(addresses.tolist(), counts.tolist(), strict=True):
            count_down(threads, (int(threads.ctas[warp * WARP]), address), count, told)


def _copy(threads: Threads, copy: Copy) -> None:
    words = np.zeros((len(copy.threads), copy.size // 4), np.uint32)
    agents = np.where(copy.agents == 0, threads.agents[copy.threads], copy.agents)
    for index in range(copy.size // 4):
        reads = copy.source_sizes > 4 * index
        sources = copy.sources[reads] + 4 * index
        words[reads, index] = threads.memory.load(sources, 4, 1, agents[reads])[:, 0]
    _write_words(threads, copy, words, agents)


def _write_words(threads: Threads, copy: Copy, words: Array, agents: Array) -> None:
    places = copy.targets[:, None] + 4 * np.arange(copy.size // 4)
    threads.shared.store(threads.ctas[copy.threads, None], places, words, agents[:, None])
