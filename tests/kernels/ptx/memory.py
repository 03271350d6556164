"""The memory that a kernel may touch: that of its tensors, and what its CTAs share. Anything else is refused."""

import ctypes
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from torch import Tensor

from .conflicts import Accesses, ConflictError
from .order import Order
from .values import UNSIGNED, Array

# Swizzles are of addresses, and repeat after so many bytes.
_ALIGNMENT = 1024


class IllegalAccessError(RuntimeError):
    """What a GPU says, if one is lucky, of an address that is misaligned or no tensor's."""


class GlobalMemory:
    """The storages of a launch's tensors, which are read and written in place, and who of `order` does so."""

    def __init__(self, tensors: Mapping[str, Tensor], order: Order) -> None:
        sharing: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.untyped_storage().nbytes():
                sharing.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor
        self._starts = np.array(sorted(sharing), np.int64)
        groups = [sharing[start] for start in self._starts.tolist()]
        sizes = [next(iter(group.values())).untyped_storage().nbytes() for group in groups]
        self._ends = self._starts + np.array(sizes, np.int64)
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
            for start, size in zip(self._starts.tolist(), sizes, strict=True)
        ]
        self._accesses = [
            Accesses(order, size, min(tensor.itemsize for tensor in group.values()), " and ".join(group))
            for group, size in zip(groups, sizes, strict=True)
        ]

    def load(self, addresses: Array, width: int, count: int, agents: Array) -> Array:
        """[threads, count] unsigned integers of `width` bytes that lie beside each other."""
        _check_alignment(addresses, width * count)
        result = np.empty((len(addresses), count), UNSIGNED[width])
        for index, chosen, offsets in self._parts(addresses, width * count):
            self._accesses[index].read(offsets, width * count, agents[chosen])
            result[chosen] = self._numbers(index, width)[offsets[:, None] // width + np.arange(count)]
        return result

    def store(self, addresses: Array, values: Array, agents: Array) -> None:
        """values: [threads, count] unsigned integers."""
        width, count = values.dtype.itemsize, values.shape[1]
        _check_alignment(addresses, width * count)
        for index, chosen, offsets in self._parts(addresses, width * count):
            self._accesses[index].write(offsets, width * count, agents[chosen])
            numbers, places = self._numbers(index, width), offsets[:, None] // width + np.arange(count)
            numbers[places] = values[chosen]
            if (numbers[places] != values[chosen]).any():
                raise ConflictError("threads write different numbers in one place")

    def update(self, address: Array, width: int, combine: Callable[[Array], Array], agent: Array) -> Array:
        """An atomic at one address: what `combine` makes of the number takes its place; gives what was there."""
        _check_alignment(address, width)
        self.note_update(address, width, agent)
        ((index, _, offset),) = self._parts(address, width)
        numbers, place = self._numbers(index, width), offset // width
        before = numbers[place]
        numbers[place] = combine(before)
        return before

    def note_update(self, addresses: Array, num_bytes: int, agent: Array) -> None:
        """As `note_read`."""
        for index, _, offsets in self._parts(addresses, num_bytes):
            self._accesses[index].update(offsets, num_bytes, agent)

    def note_read(self, addresses: Array, num_bytes: int, agent: Array) -> None:
        """Of what is read by other means. Raises what `load` does."""
        for index, _, offsets in self._parts(addresses, num_bytes):
            self._accesses[index].read(offsets, num_bytes, agent)

    def note_write(self, addresses: Array, num_bytes: int, agent: Array) -> None:
        """As `note_read`."""
        for index, _, offsets in self._parts(addresses, num_bytes):
            self._accesses[index].write(offsets, num_bytes, agent)

    def _numbers(self, index: int, width: int) -> Array:
        storage = self._bytes[index]
        return storage[: len(storage) // width * width].view(UNSIGNED[width])

    def _parts(self, addresses: Array, num_bytes: int) -> Iterator[tuple[int, Array | slice, Array]]:
        """For each storage that is touched: its index, by which of the addresses, and where, in bytes."""
        if not len(addresses):
            return
        place = np.searchsorted(self._starts, (addresses.min(), addresses.max()), side="right") - 1
        if place[0] == place[1]:
            self._check_ends(place[1:], addresses.max(keepdims=True), num_bytes)
            yield int(place[0]), slice(None), addresses - self._starts[place[0]]
            return
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        self._check_ends(place, addresses, num_bytes)
        for index in np.unique(place).tolist():
            chosen = np.flatnonzero(place == index)
            yield index, chosen, addresses[chosen] - self._starts[index]

    def _check_ends(self, place: Array, addresses: Array, num_bytes: int) -> None:
        if (place < 0).any():
            raise IllegalAccessError("an address is before every tensor")
        beyond = addresses + num_bytes - self._ends[place]
        if (beyond > 0).any():
            raise IllegalAccessError(f"an address is {beyond.max()} bytes beyond its tensor")


def _check_alignment(addresses: Array, num_bytes: int) -> None:
    if (addresses % num_bytes).any():
        raise IllegalAccessError(f"an address is no multiple of {num_bytes}")


class SharedMemory:
    """num_bytes: of each CTA; at first all bits are set, which is NaN in every float.

    Warps may write the same number in one place, as compilers have those do that hold the same.
    """

    def __init__(self, num_ctas: int, num_bytes: int, order: Order) -> None:
        self._num_bytes = num_bytes
        self._stride = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._bytes = np.full(num_ctas * self._stride, 0xFF, np.uint8)
        self._accesses = Accesses(order, len(self._bytes), 1, "shared memory", may_repeat=True)

    def load(self, ctas: Array | int, addresses: Array, width: int, agents: Array) -> Array:
        """Unsigned integers, one an address. ctas: whose memory, of each address; agents: who reads it."""
        places = self._places(ctas, addresses, width)
        self._accesses.read(places * width, width, agents)
        return self._bytes.view(UNSIGNED[width])[places]

    def store(self, ctas: Array | int, addresses: Array, values: Array, agents: Array) -> None:
        places, numbers = self._places(ctas, addresses, values.dtype.itemsize), self._bytes.view(values.dtype)
        does_change = numbers[places] != values
        offsets = (places * values.dtype.itemsize)[does_change]
        self._accesses.write(offsets, values.dtype.itemsize, np.broadcast_to(agents, places.shape)[does_change])
        numbers[places] = values
        if (numbers[places] != values).any():
            raise ConflictError("threads write different numbers in one place of shared memory")

    def note_read(self, ctas: Array | int, addresses: Array, width: int, agents: Array) -> None:
        """What is read from now on, whenever it is done."""
        self._accesses.read(self._places(ctas, addresses, width) * width, width, agents)

    def note_write(self, ctas: Array | int, addresses: Array, width: int, agents: Array) -> None:
        """As `note_read`."""
        self._accesses.write(self._places(ctas, addresses, width) * width, width, agents)

    def note_update(self, ctas: Array | int, addresses: Array, width: int, agents: Array) -> None:
        """As `note_read`, of what does not disturb one another."""
        self._accesses.update(self._places(ctas, addresses, width) * width, width, agents)

    def _places(self, ctas: Array | int, addresses: Array, width: int) -> Array:
        if (addresses % width).any():
            raise IllegalAccessError(f"a shared address is no multiple of {width}")
        if ((addresses < 0) | (addresses + width > self._num_bytes)).any():
            raise IllegalAccessError(f"a shared address is not within the {self._num_bytes} bytes")
        return (addresses + np.asarray(ctas) * self._stride) // width
