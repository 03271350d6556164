"""Sorting more than fits into memory: sorted runs on disk, merged."""

import heapq
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, BinaryIO, Self

import pyarrow as pa

from ..errors import StorageError

_BLOCK_ITEMS = 256
# Of each run a block is held while they are merged: larger items are blocks of their own.
_BLOCK_BYTES = 1024**2
# What Python takes for an item beside its bytes: two bytes objects, a tuple and a place in a list.
_ITEM_OVERHEAD_BYTES = 160
# Of a block: its bytes, and those it has compressed.
_HEADER = Struct("<QQ")
_by_key = itemgetter(0)

# A key, and what is kept beside it.
Item = tuple[bytes, bytes]


class ExternalSorter:
    """Items of a key and a payload, given in any order, read back by key; equal keys in the order given.

    A context manager: leaving it removes the runs. They take room in `folder` but have no names there, so that of a
    process that is killed nothing is left. About `memory_bytes` of items are held at a time, besides one block of each
    run while they are merged.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._stack = ExitStack()
        self._items: list[Item] = []
        self._held_bytes = 0
        self._runs: list[BinaryIO] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._items = []
        # What could not be written is tried once more, and is not wanted.
        with suppress(OSError):
            self._stack.close()

    def add(self, key: bytes, payload: bytes) -> None:
        """Raises StorageError when a run cannot be written."""
        self._items.append((key, payload))
        self._held_bytes += len(key) + len(payload) + _ITEM_OVERHEAD_BYTES
        if self._held_bytes > self._memory_bytes:
            self._spill()

    def extend(self, items: Iterable[Item]) -> None:
        """As `add` of each. Raises StorageError when a run cannot be written."""
        before = len(self._items)
        self._items += items
        added = self._items[before:]
        self._held_bytes += sum(len(key) + len(payload) for key, payload in added) + len(added) * _ITEM_OVERHEAD_BYTES
        if self._held_bytes > self._memory_bytes:
            self._spill()

    def __iter__(self) -> Iterator[Item]:
        """All items in order; can be read any number of times. Raises StorageError when a run cannot be read."""
        self._items.sort(key=_by_key)
        runs = (chain.from_iterable(self._blocks_of(run)) for run in self._runs)
        return heapq.merge(*runs, iter(self._items), key=_by_key)

    def _spill(self) -> None:
        self._items.sort(key=_by_key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            run = self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            _write_run(run, self._items)
        except OSError as error:
            raise StorageError(f"cannot sort in {self._folder}: {error.strerror or error}") from error
        self._runs.append(run)
        self._items = []
        self._held_bytes = 0

    def _blocks_of(self, run: BinaryIO) -> Iterator[list[Item]]:
        try:
            yield from _read_blocks(run)
        except (OSError, EOFError, StructError, pickle.UnpicklingError) as error:
            raise StorageError(
                f"cannot read what was sorted in {self._folder}: submit the job again ({error})"
            ) from error


def _write_run(run: BinaryIO, items: list[Item]) -> None:
    for block in _blocks(items):
        data = pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)
        # Neighbours begin alike: sorted items compress well, and quickly.
        packed = pa.compress(data, "zstd", asbytes=True)
        run.write(_HEADER.pack(len(data), len(packed)))
        run.write(packed)
    run.flush()


def _blocks(items: list[Item]) -> Iterator[list[Item]]:
    for start in range(0, len(items), _BLOCK_ITEMS):
        block = items[start : start + _BLOCK_ITEMS]
        if sum(len(key) + len(payload) for key, payload in block) <= _BLOCK_BYTES:
            yield block
        else:
            yield from ([item] for item in block)


def _read_blocks(run: BinaryIO) -> Iterator[list[Item]]:
    place = 0
    # By their places: the same run may be read twice at a time.
    while header := os.pread(run.fileno(), _HEADER.size, place):
        num_bytes, num_packed = _HEADER.unpack(header)
        packed = os.pread(run.fileno(), num_packed, place + _HEADER.size)
        if len(packed) < num_packed:
            raise EOFError("it ends early")
        yield _unpickle(pa.decompress(packed, num_bytes, "zstd", asbytes=True))
        place += _HEADER.size + num_packed


def _unpickle(data: bytes) -> Any:
    """Only what this process wrote a moment before, into a file of its own."""
    return pickle.loads(data)
