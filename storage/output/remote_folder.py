"""An output folder that fsspec opens, as on an object store, where there is no renaming.

A part has its name from the moment it is written, which is one PUT. That it is committed only the ledger tells: its
readers ask that first, and who completes a job removes what was not committed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FSSpecHandler, PyFileSystem

from ..errors import PartMissing, StorageError, StoreUnavailable
from .folder import OutputFolder

if TYPE_CHECKING:
    import pyarrow.dataset as ds

# Written and removed to learn whether writing is allowed; a killed one leaves it behind.
_PROBE = ".headrace-probe"


@dataclass(frozen=True)
class RemoteFolder(OutputFolder):
    """`url` without a password: the store's own library finds credentials in the environment."""

    url: str

    def __str__(self) -> str:
        return self.url

    def make(self) -> None:
        with self._errors("write to"):
            self.store.pipe_file(self._path(_PROBE), b"")
            self._remove(_PROBE)

    def has_file(self, url: str) -> bool:
        """Whether a URL names a file directly in it, in whatever way both are written."""
        from fsspec.core import url_to_fs

        store, path = url_to_fs(url)
        return type(store) is type(self.store) and path.rpartition("/")[0] == self._root

    def exists(self) -> bool:
        # A store has no folders: one that is not there is one that is empty.
        return True

    def is_bare(self) -> bool:
        return False

    def names(self) -> list[str]:
        # An empty folder is not there.
        with self._errors("list"), suppress(FileNotFoundError):
            return sorted(set(self._names()) - {_PROBE})
        return []

    def _names(self) -> Iterator[str]:
        for entry in self.store.ls(self._root, detail=True):
            path = entry["name"].rstrip("/")
            if path.strip("/") != self._root.strip("/"):
                yield path.rpartition("/")[2]
            # An object that marks the folder is empty.
            elif entry["type"] == "file" and entry["size"]:
                raise StorageError(f"output {self} is not a folder: choose another")

    def read(self, name: str) -> bytes:
        with self._errors("read", name, FileNotFoundError):
            return bytes(self.store.cat_file(self._path(name)))

    def create(self, name: str, data: bytes) -> None:
        try:
            with self._errors("write", name, FileExistsError):
                self.store.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            # Ours all the same, should the answer have been lost and the request have been sent again.
            if self.read(name) != data:
                raise

    def replace(self, name: str, data: bytes) -> None:
        with self._errors("write", name):
            self.store.pipe_file(self._path(name), data)

    @contextmanager
    def held(self, name: str) -> Iterator[bytes | None]:
        try:
            content = self.read(name)
        except FileNotFoundError:
            yield None
        else:
            yield content

    def remove(self, names: Sequence[str]) -> None:
        if paths := [self._path(name) for name in names]:
            with self._errors("remove files of"), suppress(FileNotFoundError):
                self.store.rm(paths)

    def remove_folder(self) -> None:
        pass

    def write_part(self, name: str, table: pa.Table) -> None:
        # Parts are as small as shards.
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        self.replace(name, buffer.getvalue().to_pybytes())

    def publish(self, name: str) -> None:
        pass

    def withdraw(self, name: str) -> None:
        with self._errors("remove", name):
            self._remove(name)

    def discard(self, name: str) -> None:
        self.withdraw(name)

    def remove_merged(self, names: Sequence[str]) -> None:
        self.remove(names)

    def maybe_uncommitted(self) -> list[str]:
        return self.part_names()

    def unpublished(self, names: Sequence[str]) -> list[str]:
        return []

    def find_parts(self, names: Sequence[str]) -> list[str]:
        # One listing rather than a request for each.
        there = set(self.part_names()) if names else set()
        return [name for name in names if name in there]

    def open_part(self, name: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(pa.BufferReader(self.read(name)))
        except FileNotFoundError:
            raise PartMissing(f"part {self}/{name} is gone") from None

    def dataset(self, names: Sequence[str]) -> "ds.Dataset":
        # As in a folder on a disk.
        import pyarrow.dataset as ds

        return ds.dataset(list(names), format="parquet", filesystem=PyFileSystem(_Handler(self)))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.store.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def _root(self) -> str:
        return self._opened[1]

    @property
    def store(self) -> Any:
        """fsspec's file system."""
        store = self._opened[0]
        # Other processes write there too.
        store.invalidate_cache()
        return store

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        # A tenth of a second to import, and seldom needed.
        from fsspec.core import url_to_fs

        store, path = url_to_fs(self.url)
        return store, path.rstrip("/")

    @contextmanager
    def _errors(self, what: str, name: str | None = None, but: type[Exception] = StorageError) -> Iterator[None]:
        """All errors `but` one as StoreUnavailable. The boundary to libraries each of which has errors of its own."""
        try:
            yield
        except (StorageError, but):
            raise
        except Exception as error:
            place = f"output {self}" if name is None else f"{self}/{name}"
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StoreUnavailable(f"cannot {what} {place}: {reason}") from error


class _Handler(FSSpecHandler):  # type: ignore[misc]
    """Gives Arrow whole parts by their names: one request each, with our errors."""

    def __init__(self, folder: RemoteFolder) -> None:
        super().__init__(folder.store)
        self._folder = folder

    def open_input_file(self, path: str) -> pa.BufferReader:
        return pa.BufferReader(self._folder.read(path))
