"""Copies from global to shared memory that go on beside the threads (PTX ISA, 9.7.9.25).

A copy arrives as late as it may, when it is waited for; until then its place holds NaN. So who reads too early, or
has copied over what is yet to be read, sees it.
"""

from dataclasses import dataclass

import numpy as np

from ..memory import IllegalAccessError
from ..program import Instruction, Literal
from ..threads import Threads
from ..values import Array
from .registry import executes


@dataclass
class Copy:
    """What threads have begun: a row a thread. group: the thread's how manieth."""

    threads: Array
    targets: Array
    sources: Array
    source_sizes: Array
    groups: Array
    size: int

    def chosen(self, rows: Array) -> "Copy":
        arrays = (self.threads, self.targets, self.sources, self.source_sizes, self.groups)
        threads, targets, sources, sizes, groups = (each[rows] for each in arrays)
        return Copy(threads, targets, sources, sizes, groups, self.size)


@executes("cp", modifiers="async ca cg shared global")
def begin(threads: Threads, instruction: Instruction) -> None:
    """What is beyond the source's size is zero."""
    target, source, size, *source_size = instruction.operands
    assert isinstance(size, Literal)
    acting = threads.acting()
    sizes = threads.read(source_size[0] if source_size else size, "u32").astype(np.int64)
    targets, sources = threads.addresses(target, "shared"), threads.addresses(source, "global")
    given = (acting, targets[acting], sources[acting], sizes[acting], threads.committed_copies[acting])
    copy = Copy(*given, size.bits)
    if (copy.targets % copy.size).any() or (copy.sources % copy.size)[copy.source_sizes > 0].any():
        raise IllegalAccessError(f"an address is no multiple of {copy.size}")
    _write_words(threads, copy, np.full((len(acting), copy.size // 4), 0xFFFFFFFF, np.uint32))
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
    waiting, threads.copies = threads.copies, []
    for copy in waiting:
        is_due = acting[copy.threads] & (copy.groups < arrived[copy.threads])
        if is_due.any():
            _arrive(threads, copy.chosen(is_due))
        if not is_due.all():
            threads.copies.append(copy.chosen(~is_due))


def _arrive(threads: Threads, copy: Copy) -> None:
    words = np.zeros((len(copy.threads), copy.size // 4), np.uint32)
    for index in range(copy.size // 4):
        reads = copy.source_sizes > 4 * index
        sources, agents = copy.sources[reads] + 4 * index, threads.agents[copy.threads[reads]]
        words[reads, index] = threads.memory.load(sources, 4, 1, agents)[:, 0]
    _write_words(threads, copy, words)


def _write_words(threads: Threads, copy: Copy, words: Array) -> None:
    places = copy.targets[:, None] + 4 * np.arange(copy.size // 4)
    agents = threads.agents[copy.threads, None]
    threads.shared.store(threads.ctas[copy.threads, None], places, words, agents)
