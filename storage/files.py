"""Files that are whole and on the disk, or not there."""

import os
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
        path.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure: syncing a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
