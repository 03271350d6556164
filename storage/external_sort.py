"""Sorting more than fits into memory: sorted runs on disk, merged."""

import heapq
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from .errors import StorageError

_BLOCK_ITEMS = 256
# Of each run a block is held while they are merged: larger items are blocks of their own.
_BLOCK_BYTES = 1024**2
# What Python takes for an item beside its bytes: two bytes objects, a tuple and a place in a list.
_ITEM_OVERHEAD_BYTES = 160
_by_key = itemgetter(0)

Item = tuple[bytes, bytes]


class ExternalSorter:
    """Items of a key and a payload, given in any order, read back by key; equal keys in the order given.

    A context manager: leaving it removes the runs, which lie in a folder of their own under `folder`. About
    `memory_bytes` of items are held at a time, besides one block of each run while they are merged.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._parent = folder
        self._memory_bytes = memory_bytes
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._items: list[Item] = []
        self._held_bytes = 0
        self._runs: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._items = []
        if self._folder is not None:
            self._folder.cleanup()

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
        return heapq.merge(*map(_read_run, self._runs), iter(self._items), key=_by_key)

    def _spill(self) -> None:
        self._items.sort(key=_by_key)
        try:
            path = self._run_path()
            _write_run(path, self._items)
        except OSError as error:
            raise StorageError(f"cannot sort in {self._parent}: {error.strerror or error}") from error
        self._runs.append(path)
        self._items = []
        self._held_bytes = 0

    def _run_path(self) -> Path:
        if self._folder is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=self._parent, prefix=".sort-")
        return Path(self._folder.name) / f"run-{len(self._runs):05d}.zst"


def _write_run(path: Path, items: list[Item]) -> None:
    # Neighbours begin alike: sorted items compress well, and quickly.
    with path.open("wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
        for block in _blocks(items):
            data = pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)
            stream.write(len(data).to_bytes(8))
            stream.write(data)


def _blocks(items: list[Item]) -> Iterator[list[Item]]:
    for start in range(0, len(items), _BLOCK_ITEMS):
        block = items[start : start + _BLOCK_ITEMS]
        if sum(len(key) + len(payload) for key, payload in block) <= _BLOCK_BYTES:
            yield block
        else:
            yield from ([item] for item in block)


def _read_run(path: Path) -> Iterator[Item]:
    return chain.from_iterable(_read_blocks(path))


def _read_blocks(path: Path) -> Iterator[list[Item]]:
    try:
        with path.open("rb") as file, pa.CompressedInputStream(file, "zstd") as stream:
            while header := stream.read(8):
                yield _unpickle(stream.read(int.from_bytes(header)))
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(f"cannot read the sorted run {path}: submit the job again ({error})") from error


def _unpickle(data: bytes) -> Any:
    """Only what this process wrote a moment before, into a folder of its own."""
    return pickle.loads(data)
