"""Files that are whole and on the disk, or not there."""

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .errors import StorageError


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write and sync a Parquet file and the entry of its folder. Leaves no file behind when it fails.

    Raises StorageError. The file may be seen incomplete until this returns.
    """
    try:
        with path.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        _remove_if_possible(path)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write and sync a text file, which is there only once it is whole. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # Also where `lines` raises.
        _remove_if_possible(temporary)


def remove_old(folder: Path, seconds: float) -> None:
    """Remove the files and folders in `folder` that have not changed for so long, as far as that can be done."""
    newest = time.time() - seconds
    with suppress(OSError):
        for path in folder.iterdir():
            # Others may do the same.
            with suppress(OSError):
                if path.lstat().st_mtime < newest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_if_possible(path: Path) -> None:
    """Where a file cannot be written, as the disk is only to be read, what is left of it cannot be removed either."""
    with suppress(OSError):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure: syncing a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
