"""A file that is replaced as a whole, or is there to be held, while one process has it in its hands."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import StorageError

# Whoever has it needs milliseconds; one that was stopped meanwhile is not waited for.
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01


@contextmanager
def held_file(path: Path) -> Iterator[bytes | None]:
    """What is in the file, None without one. Until the context ends nobody else who holds it changes or removes it.

    Raises StorageError when another keeps it for seconds, OSError when it cannot be read.
    """
    with _held(path, _opened) as file:
        yield None if file is None else file.read()


@contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """Hold a file that is there for nothing else, and is removed when the context ends; its folder is made.

    One that can not be removed then stays, and is held by nobody.

    Raises StorageError when another keeps it for seconds, OSError when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path, lambda path: path.open("ab")):
        try:
            yield
        finally:
            # Who tidies up after tries that were killed may have been here. What was done under it is done.
            with suppress(OSError):
                path.unlink()


@contextmanager
def _held(path: Path, opened: Callable[[Path], BinaryIO | None]) -> Iterator[BinaryIO | None]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (file := opened(path)) is not None:
        with file:
            if _is_locked(file) and _is_still(file, path):
                yield file
                return
        if time.monotonic() > deadline:
            raise StorageError(f"{path} is being written by another process: try again")
        time.sleep(_POLL_SECONDS)
    yield None


def _opened(path: Path) -> BinaryIO | None:
    try:
        # For writing, without which NFS locks nothing; another user's may be for reading only.
        return path.open("rb+" if os.access(path, os.W_OK) else "rb")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system that has no locks.
        return True
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Whether it was not replaced or removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
