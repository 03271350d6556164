"""Something done every so often in a thread of its own."""

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Self

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ..storage.errors import LedgerError

logger = logging.getLogger(__name__)

# A disk that is full for a night is to be filled no further by lines that say so.
_REPEAT_SECONDS = 60.0
# What differs between messages that say the same: times, positions.
_NUMBER = re.compile(r"\d+")


class Periodic:
    """Calls `action` every `seconds` while the context lasts.

    An unreachable Redis or ledger is waited out; as long as nothing else is wrong it is named once a minute.
    """

    def __init__(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        self._name = name
        self._seconds = seconds
        self._action = action
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # What was said last, and until when it need not be said again.
        self._said, self._said_until = "", 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self._action()
            except (LedgerError, RedisError, OperationalError, OSError) as error:
                self._warn(str(error))
            # The thread's boundary: leases that are renewed no more, without a word, would be worse than any error.
            except Exception:
                logger.exception("%s: trying again", self._name)

    def _warn(self, problem: str) -> None:
        now, kind = time.monotonic(), _NUMBER.sub("", problem)
        if kind != self._said or now >= self._said_until:
            logger.warning("%s: %s; trying again", self._name, problem)
            self._said, self._said_until = kind, now + _REPEAT_SECONDS
