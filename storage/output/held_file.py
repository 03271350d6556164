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
def held_lock(path: Path, mark: str = "") -> Iterator[None]:
    """Hold a file that is there for nothing else, and is removed when the context ends; its folder is made.

    One that can not be removed then stays, and is held by nobody, as that of a process that was killed: with the `mark`
    in it, if there was room for that.

    Raises StorageError when another keeps it for seconds, OSError when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path, lambda path: path.open("ab")) as file:
        assert file is not None
        try:
            _write_mark(file, mark)
            yield
        finally:
            # Who tidies up after tries that were killed may have been here. What was done under it is done.
            with suppress(OSError):
                path.unlink()


@contextmanager
def abandoned_lock(path: Path) -> Iterator[str | None]:
    """The mark in a lock that its holder has left, None where it is gone; until the context ends nobody else holds it.

    Raises OSError, as where somebody holds it, or there are no locks.
    """
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.read().decode(errors="replace") if _is_still(file, path) else None


def is_held(path: Path) -> bool:
    """Whether somebody holds a lock now."""
    try:
        with abandoned_lock(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        # It is not there, or there are no locks.
        return False


def _write_mark(file: BinaryIO, mark: str) -> None:
    # What is done under the lock may need no room.
    with suppress(OSError):
        file.truncate(0)
        file.write(mark.encode())
        file.flush()


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
