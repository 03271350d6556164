"""The memory that a kernel may touch: that of its tensors, and what its CTAs share. Anything else is refused."""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .values import UNSIGNED, Array

# Swizzles are of addresses, and repeat after so many bytes.
_ALIGNMENT = 1024


class IllegalAccessError(RuntimeError):
    """What a GPU says, if one is lucky, of an address that is misaligned or no tensor's."""


class GlobalMemory:
    """The storages of a launch's tensors, which are read and written in place."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        starts = sorted(start for start, size in storages.items() if size)
        self._starts = np.array(starts, np.int64)
        self._sizes = np.array([storages[start] for start in starts], np.int64)
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * storages[start]).from_address(start)) for start in starts
        ]

    def load(self, addresses: Array, width: int, count: int = 1) -> Array:
        """[threads, count] unsigned integers of `width` bytes that lie beside each other."""
        result = np.empty((len(addresses), count), UNSIGNED[width])
        for storage, chosen, places in self._parts(addresses, width, count):
            result[chosen] = storage[places]
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """values: [threads, count] unsigned integers."""
        for storage, chosen, places in self._parts(addresses, values.dtype.itemsize, values.shape[1]):
            storage[places] = values[chosen]

    def _parts(self, addresses: Array, width: int, count: int) -> list[tuple[Array, Array, Array]]:
        """For each storage that is touched: its numbers, by which threads, and where."""
        if (addresses % (width * count)).any():
            raise IllegalAccessError(f"an address is no multiple of {width * count}")
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        if (place < 0).any():
            raise IllegalAccessError("an address is before every tensor")
        offsets = addresses - self._starts[place]
        beyond = offsets + width * count - self._sizes[place]
        if (beyond > 0).any():
            raise IllegalAccessError(f"an address is {beyond.max()} bytes beyond its tensor")
        parts = []
        for index in np.unique(place):
            chosen = np.flatnonzero(place == index)
            storage = self._bytes[index]
            numbers = storage[: len(storage) // width * width].view(UNSIGNED[width])
            parts.append((numbers, chosen, offsets[chosen, None] // width + np.arange(count)))
        return parts


class SharedMemory:
    """num_bytes: of each CTA; at first all bits are set, which is NaN in every float."""

    def __init__(self, num_ctas: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._stride = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._bytes = np.full(num_ctas * self._stride, 0xFF, np.uint8)

    def load(self, ctas: Array | int, addresses: Array, width: int) -> Array:
        """Unsigned integers, one an address. ctas: whose memory, of each address."""
        return self._bytes.view(UNSIGNED[width])[self._places(ctas, addresses, width)]

    def store(self, ctas: Array | int, addresses: Array, values: Array) -> None:
        width = values.dtype.itemsize
        self._bytes.view(UNSIGNED[width])[self._places(ctas, addresses, width)] = values

    def _places(self, ctas: Array | int, addresses: Array, width: int) -> Array:
        if (addresses % width).any():
            raise IllegalAccessError(f"a shared address is no multiple of {width}")
        if ((addresses < 0) | (addresses + width > self._num_bytes)).any():
            raise IllegalAccessError(f"a shared address is not within the {self._num_bytes} bytes")
        return (addresses + np.asarray(ctas) * self._stride) // width
