"""An output folder on a disk. A part has a hidden name until it is committed."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import PartMissing, StorageError
from ..files import sync_folder, write_parquet
from .folder import OutputFolder
from .held_file import held_file

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_MAX_READS = 5


@dataclass(frozen=True)
class LocalFolder(OutputFolder):
    """`DIR/*.parquet` never shows a row that the ledger does not know."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StorageError(f"output {self} is not a folder: choose another") from error
        except OSError as error:
            raise StorageError(f"cannot use output folder {self}: {error.strerror}") from error

    def exists(self) -> bool:
        return self.path.is_dir()

    def is_bare(self) -> bool:
        try:
            with os.scandir(self.path) as entries:
                return next(entries, None) is None
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise StorageError(f"cannot use output folder {self}: {error.strerror}") from error

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot use output folder {self}: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(name) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise StorageError(f"cannot read {self.path / name}: {error.strerror}") from error

    def create(self, name: str, data: bytes) -> None:
        try:
            # The name first; the content then comes in whole, unless somebody took the name away in between.
            (self.path / name).open("x").close()
        except FileExistsError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error.strerror}") from error
        try:
            with self.held(name) as content:
                if is_ours := content == b"":
                    self.replace(name, data)
        except StorageError:
            with suppress(OSError):
                (self.path / name).unlink()
            raise
        if not is_ours:
            raise FileExistsError(name)

    def replace(self, name: str, data: bytes) -> None:
        path, temporary = self.path / name, self._hidden(name)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(f"cannot write {path}: {error.strerror}") from error

    @contextmanager
    def held(self, name: str) -> Iterator[bytes | None]:
        try:
            with held_file(self.path / name) as content:
                yield content
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error.strerror}") from error

    def remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            sync_folder(self.path)
        except OSError as error:
            raise StorageError(f"cannot remove files of {self}: {error.strerror}") from error

    def remove_folder(self) -> None:
        try:
            with suppress(FileNotFoundError):
                self.path.rmdir()
        except OSError as error:
            # One that is mounted there, as in containers, stays, and is empty.
            if error.errno != errno.EBUSY:
                raise StorageError(f"cannot remove {self}: {error.strerror}") from error

    def write_part(self, name: str, table: pa.Table) -> None:
        try:
            write_parquet(self._hidden(name), table)
        except StorageError as error:
            if self.path.exists():
                raise
            raise self.lost() from error

    def publish(self, name: str) -> None:
        path = self.path / name
        try:
            try:
                self._hidden(name).rename(path)
            except FileNotFoundError:
                if not path.exists():
                    raise PartMissing(f"part {path} is gone") from None
            sync_folder(self.path)
        except OSError as error:
            raise StorageError(f"cannot publish {path}: {error.strerror}") from error

    def withdraw(self, name: str) -> None:
        _remove(self.path / name)

    def discard(self, name: str) -> None:
        _remove(self._hidden(name))

    def remove_merged(self, names: Sequence[str]) -> None:
        # The hidden names first: who is about to publish one too has done so by then, or cannot any more.
        for name in names:
            self.discard(name)
            self.withdraw(name)

    def maybe_uncommitted(self) -> list[str]:
        hidden = (name for name in self.names() if name.startswith(".part-") and name.endswith(".tmp"))
        return [name.removeprefix(".").removesuffix(".tmp") for name in hidden]

    def unpublished(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._hidden(name).exists()]

    def find_parts(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._place(name) is not None]

    def open_part(self, name: str) -> pq.ParquetFile:
        # The one who published it may be renaming it at the moment; nobody can rename what is open.
        for _ in range(_MAX_READS):
            if (path := self._place(name)) is None:
                break
            try:
                return pq.ParquetFile(path)
            except FileNotFoundError:
                continue
        raise PartMissing(f"part {self.path / name} is gone")

    def dataset(self, names: Sequence[str]) -> "ds.Dataset":
        # Here, not above: with it comes pandas where it is installed, which other commands should not wait for.
        import pyarrow.dataset as ds

        places = [self._place(name) for name in names]
        if None in places:
            raise FileNotFoundError(self.path / names[places.index(None)])
        return ds.dataset(list(map(str, places)), format="parquet")

    def _place(self, name: str) -> Path | None:
        """Where a committed part is: under its final name, or for a moment still under its hidden one."""
        # The final name once more: it may have got it between the first look and the second.
        places = (self.path / name, self._hidden(name), self.path / name)
        return next((place for place in places if place.exists()), None)

    def _hidden(self, name: str) -> Path:
        return self.path / f".{name}.tmp"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error.strerror}") from error
