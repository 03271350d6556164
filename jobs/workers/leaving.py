"""The end of a worker that was told to stop while Redis hangs."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

logger = logging.getLogger(__name__)

# How long Redis may take to answer one who leaves, and how often it is asked.
PATIENCE_SECONDS = 2.0


class Leaving:
    """A context manager around what is to be left, each part of which would wait for a Redis that hangs, one after the
    other: that takes longer than process managers leave a process to end.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._has_left = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._has_left.set()

    def begin(self, redis_url: str, is_busy: Callable[[], bool]) -> None:
        """From now on end the process (status 0) where Redis hangs, unless it `is_busy` with what others would miss."""
        threading.Thread(target=self._watch, args=(redis_url, is_busy), name="leaving", daemon=True).start()

    def _watch(self, redis_url: str, is_busy: Callable[[], bool]) -> None:
        seconds = self._patience_seconds
        limits = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        with Redis.from_url(redis_url, retry=Retry(NoBackoff(), 0), **limits) as redis:
            while not self._has_left.wait(seconds):
                if not is_busy() and _hangs(redis):
                    logger.warning("Redis does not answer: stopped without taking leave of it")
                    logging.shutdown()
                    # Live requests are taken over when their leases end.
                    os._exit(0)


def _hangs(redis: "Redis") -> bool:
    try:
        redis.ping()
    except RedisTimeout:
        return True
    except RedisError:
        # Nobody waits for one that is gone.
        return False
    return False
