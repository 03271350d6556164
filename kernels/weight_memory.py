"""Memory for weights on the host, in pages of 2 MiB where the system has them.

A decode reads every weight once, and with pages of 4 KiB a good part of that is looking their addresses up.
"""

import math
from collections.abc import Sequence
from threading import Lock

import numpy
import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 * 2**20
# Weights lie in it one after the other, since most are smaller than a page.
_CHUNK_BYTES = 32 * 2**20
# What compiled kernels read at a time.
_ALIGNMENT_BYTES = 64


class _Chunks:
    """Hands out memory from chunks; a chunk is freed when all that lies in it is, the last one apart."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        # Engines may be made side by side.
        self._lock = Lock()

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned for the kernels."""
        padded = num_bytes + -num_bytes % _ALIGNMENT_BYTES
        if padded > _CHUNK_BYTES:
            return _huge_pages(padded)[:num_bytes]
        with self._lock:
            if padded > len(self._rest):
                self._rest = _huge_pages(_CHUNK_BYTES)
            taken, self._rest = self._rest[:num_bytes], self._rest[padded:]
        return taken


_chunks = _Chunks()


def empty_weight(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is still to be filled, and stays: its memory is given back with that of its neighbours."""
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _chunks.take(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def _huge_pages(num_bytes: int) -> Tensor:
    """At least so many bytes from a page's beginning on. numpy asks the system for such pages, torch does not."""
    memory = numpy.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=numpy.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % _HUGE_PAGE_BYTES :])
