"""Who may use an engine: one thread at a time, of the process that has loaded its model."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import EngineError


class EngineLock:
    """A lock that belongs to the process that has made it, and may be taken again by the thread that holds it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # A bar of the caller's own may ask something itself.
        self._lock = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other thread holds it. Raises EngineError in a forked process.

        There a step would wait for threads that only the parent has, and a lock for whoever held it.
        """
        if os.getpid() != self._process:
            raise EngineError(
                "the model was loaded by the process that this one was forked from, and does not compute here: load it "
                'where it is used, or start processes by "spawn"'
            )
        with self._lock:
            yield
