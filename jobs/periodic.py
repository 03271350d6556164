"""Something done every so often in a thread of its own."""

import logging
import threading
from collections.abc import Callable
from typing import Self

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ..storage.errors import LedgerError
from .rare_warnings import RareWarnings

logger = logging.getLogger(__name__)


class Periodic:
    """Calls `action` every `seconds` while the context lasts.

    An unreachable Redis or ledger is waited out; as long as nothing else is wrong it is named once a minute.
    `interrupt`: called as the context ends, has an action end soon that may wait for others.
    """

    def __init__(
        self, name: str, seconds: float, action: Callable[[], None], interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._action = action
        self._interrupt = interrupt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._warnings = RareWarnings(logger)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._interrupt()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self._action()
            except (LedgerError, RedisError, OperationalError, OSError) as error:
                self._warnings.warn(f"{self._name}: {error}; trying again")
            # The thread's boundary: leases that are renewed no more, without a word, would be worse than any error.
            except Exception:
                logger.exception("%s: trying again", self._name)
