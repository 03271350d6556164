"""Where files of the API lie: whole and synced under their id, or not there. Clients' names are never paths."""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from ...storage.errors import StorageError
from ...storage.files import sync_folder
from ...storage.ledger.file_records import FileRecord, FileRecords, NewFile
from ...storage.ledger.ledger import Ledger
from ..errors import JobError
from ..settings import Settings

# Files expire after this unless their owner says otherwise.
DEFAULT_EXPIRY_SECONDS = 30 * 86400
_TEMPORARY = ".incoming-"
# What nobody has recorded or finished by then never will be.
_STRAY_SECONDS = 86400
_NAMES_AT_ONCE = 500


class FileTooLarge(JobError):
    """A file has more bytes than may be stored."""


class IncomingFile:
    """Bytes on their way into the store, under a temporary name until `keep`."""

    def __init__(self, path: Path, file: BinaryIO, max_bytes: int | None) -> None:
        self._path = path
        self._file = file
        self._max_bytes = max_bytes
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises `FileTooLarge`, StorageError."""
        self.num_bytes += len(data)
        if self._max_bytes is not None and self.num_bytes > self._max_bytes:
            raise FileTooLarge(f"the file is larger than {self._max_bytes:,} bytes: split it")
        self._digest.update(data)
        with _translated(self._path):
            self._file.write(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def keep(self, file_id: str) -> None:
        """Give the file its place, whatever was there before. Raises StorageError."""
        with _translated(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._path.rename(self._path.with_name(file_id))
            sync_folder(self._path.parent)


class FileStore:
    """The files of `folder` and what is known of them. Thread-safe.

    `max_bytes`: the most an uploaded file may have. A file is in place before it is recorded and forgotten before it
    is removed: what is recorded is there.
    """

    def __init__(self, folder: Path, records: FileRecords, max_bytes: int) -> None:
        self.records = records
        self.max_bytes = max_bytes
        self._folder = folder

    @classmethod
    def of(cls, settings: Settings, ledger: Ledger) -> Self:
        """The store in a data folder."""
        return cls(settings.data_dir / "files", ledger.files, settings.max_file_bytes)

    def path(self, file: FileRecord) -> Path:
        return self._folder / file.id

    @contextmanager
    def incoming(self, max_bytes: int | None = None) -> Iterator[IncomingFile]:
        """A file to write into; what is not kept is gone at the end. Raises StorageError."""
        path = self._folder / f"{_TEMPORARY}{secrets.token_hex(12)}"
        with _translated(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        try:
            with file:
                yield IncomingFile(path, file, max_bytes)
        finally:
            path.unlink(missing_ok=True)

    def add(self, incoming: IncomingFile, file: NewFile) -> FileRecord:
        """Keep and record a file. Raises StorageError, `LedgerError`."""
        incoming.keep(file.id)
        return self.records.add(file)

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises UnknownFile."""
        self.records.delete(tenant, file_id)
        (self._folder / file_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the files that have expired, and what was never recorded or finished."""
        for file_id in self.records.delete_expired():
            (self._folder / file_id).unlink(missing_ok=True)
        strays = [path.name for path in self._old_files()]
        for start in range(0, len(strays), _NAMES_AT_ONCE):
            names = strays[start : start + _NAMES_AT_ONCE]
            for name in set(names) - self.records.known(names):
                (self._folder / name).unlink(missing_ok=True)

    def _old_files(self) -> Iterator[Path]:
        if not self._folder.is_dir():
            return
        newest = time.time() - _STRAY_SECONDS
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # One that was on its way has got its place, or is gone, since the folder was looked at.
                with suppress(FileNotFoundError):
                    if entry.stat().st_mtime < newest:
                        yield Path(entry.path)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
