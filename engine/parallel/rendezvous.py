"""The file by which the ranks of a model find each other, in a folder that does not outlive them for long."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from weakref import finalize

_PREFIX = "headrace-ranks-"
# A new folder is locked in an instant: one that is not by then has lost its process.
_SECONDS_TO_LOCK = 60.0


class Rendezvous:
    """A folder of this process's own, locked for as long as it lives, with the path of a file that is not there yet.

    `remove` ends it; what a process left that was killed, the next one that makes a rendezvous removes.
    """

    def __init__(self) -> None:
        _remove_what_is_left()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(self.folder, os.O_RDONLY)
        self._unlock = finalize(self, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)

    @property
    def file(self) -> str:
        return str(self.folder / "rendezvous")

    def remove(self) -> None:
        """Harmless when repeated, in any thread."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()


def _remove_what_is_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Somebody else's, or gone meanwhile.
        with suppress(OSError):
            _remove_unless_in_use(folder)


def _remove_unless_in_use(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime < _SECONDS_TO_LOCK:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
