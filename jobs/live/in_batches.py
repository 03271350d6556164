"""A thread that works through what others hand it, as much at a time as has come."""

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
# How often a thread that is handed nothing looks at what has to be done all the same.
TICK_SECONDS = 0.25


class InBatches(Generic[T]):
    """Calls `work` in a thread of its own; a context manager that works off what is left before it ends.

    `work` also gets an empty list when nothing has come for `tick_seconds`.
    """

    def __init__(self, name: str, work: Callable[[list[T]], None], tick_seconds: float = TICK_SECONDS) -> None:
        self._work = work
        self._tick_seconds = tick_seconds
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # May be called from any thread, and as a callback of the engine's: it only appends.
        self.put: Callable[[T], None] = self._items.put

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set() or not self._items.empty():
            items = self._take()
            try:
                self._work(items)
            # The thread's boundary: what one batch brings about must not end what serves all others.
            except Exception:
                logger.exception("%s: %d things could not be worked on", self._thread.name, len(items))

    def _take(self) -> list[T]:
        items: list[T | None] = []
        try:
            items.append(self._items.get(timeout=self._tick_seconds))
            while True:
                items.append(self._items.get_nowait())
        except Empty:
            return [item for item in items if item is not None]
