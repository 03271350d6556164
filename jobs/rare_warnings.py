"""Warnings of what goes wrong again and again, said once in a while."""

import logging
import re
import threading
import time

# A disk that is full for a night is to be filled no further by lines that say so.
_REPEAT_SECONDS = 60.0
# What differs between messages that say the same: times, positions.
_NUMBER = re.compile(r"\d+")


class RareWarnings:
    """Thread-safe. As long as nothing else is wrong, what goes wrong is said once a minute."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        # What was said last, and until when it need not be said again.
        self._said, self._said_until = "", 0.0

    def warn(self, problem: str) -> None:
        """Log it, unless the same was said a moment ago."""
        now, kind = time.monotonic(), _NUMBER.sub("", problem)
        with self._lock:
            if kind == self._said and now < self._said_until:
                return
            self._said, self._said_until = kind, now + _REPEAT_SECONDS
        self._logger.warning("%s", problem)
