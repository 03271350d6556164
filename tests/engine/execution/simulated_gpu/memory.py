"""The device's memory: who has it, how much there is, and what is in it when nobody has written to it."""

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from .streams import Stream, Timeline

_ROUNDED_BYTES = 512


class Pool:
    """Memory of graphs that do not run at once: it stays theirs, and what one has freed another may use.

    `freed`: what lies in it and nobody holds, with the graph whose capture took it.
    """

    def __init__(self) -> None:
        self.num_graphs = self.num_bytes = self.peak = 0
        self.freed: list[tuple[object, Tensor]] = []


class Memory:
    """`total`: bytes of the device, of which others have `others`. Like torch's allocator it keeps what it once had."""

    def __init__(self, timeline: Timeline, total: int, others: int) -> None:
        self.timeline = timeline
        self.total, self.others = total, others
        self.allocated = self.reserved = self.max_reserved = 0
        # Whose capture is under way, and in which pool.
        self.capturing: tuple[object, Pool] | None = None
        self._underway: list[Pool] = []
        self._pools: WeakSet[Pool] = WeakSet()

    def new_pool(self) -> Pool:
        pool = Pool()
        self._pools.add(pool)
        return pool

    @property
    def used(self) -> int:
        return self.allocated + sum(pool.peak for pool in self._pools)

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> "Allocation":
        """Raises `torch.OutOfMemoryError`."""
        numel = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        num_bytes = -(-numel * dtype.itemsize // _ROUNDED_BYTES) * _ROUNDED_BYTES
        if self.used + num_bytes > self.total - self.others:
            raise torch.OutOfMemoryError(f"CUDA out of memory.\nTried to allocate {num_bytes} bytes")
        allocation = Allocation(self, torch.empty_strided(shape, stride, dtype=dtype), num_bytes)
        self.reserved = max(self.reserved, self.used)
        self.max_reserved = max(self.max_reserved, self.reserved)
        return allocation

    def empty_cache(self) -> None:
        self.timeline.refuse_in_capture("empty_cache")
        if self._underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.reserved = self.used

    def begin_allocate_to_pool(self, pool: Pool) -> None:
        pool.num_graphs += 1
        self._underway.append(pool)

    def end_allocate_to_pool(self, device: int, pool: Pool) -> None:
        if pool not in self._underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._underway.remove(pool)

    def release_pool(self, device: int, pool: Pool) -> None:
        """A graph is gone; with the last one goes the memory."""
        pool.num_graphs -= 1
        if not pool.num_graphs:
            pool.peak = pool.num_bytes
            pool.freed.clear()

    def reset_peak(self) -> None:
        self.max_reserved = self.reserved


class Allocation:
    """A tensor's memory. As soon as the last tensor in it is gone it may become another's, in its stream's order."""

    def __init__(self, memory: Memory, content: Tensor, num_bytes: int) -> None:
        self._memory, self._content, self._num_bytes = memory, content, num_bytes
        self._stream: Stream = memory.timeline.current
        self._owner: object = None
        self._pool: Pool | None = None
        if memory.capturing is not None and memory.timeline.is_capturing:
            self._owner, self._pool = memory.capturing
        if self._pool is None:
            memory.allocated += num_bytes
        else:
            self._pool.num_bytes += num_bytes
            self._pool.peak = max(self._pool.peak, self._pool.num_bytes)
            memory.timeline.launch(lambda: poison(content))
        poison(content)

    @property
    def content(self) -> Tensor:
        return self._content

    def __del__(self) -> None:
        content, pool = self._content, self._pool
        if pool is None:
            self._memory.allocated -= self._num_bytes
            self._stream.launch(lambda: poison(content))
            return
        pool.num_bytes -= self._num_bytes
        pool.freed.append((self._owner, content))
        if self._memory.capturing == (self._owner, pool):
            self._memory.timeline.launch(lambda: poison(content), self._stream)


def poison(content: Tensor) -> None:
    """Fill with numbers that no result survives."""
    if content.dtype.itemsize == 1:
        # Of both 8-bit floats a NaN.
        content.view(torch.uint8).fill_(0x7F)
    elif content.dtype.is_floating_point:
        content.fill_(torch.nan)
    else:
        content.fill_(torch.iinfo(content.dtype).min // 2)
