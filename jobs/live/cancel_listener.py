"""Hears which requests their users have called off."""

import logging
import threading
from collections.abc import Callable
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from ..rare_warnings import RareWarnings
from .keys import CANCEL_CHANNEL

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_RETRY_SECONDS = 0.5


class CancelListener:
    """Calls `on_cancel` with each request's id, in a thread of its own, while the context lasts.

    What it misses while Redis is away the renewal of leases finds.
    """

    def __init__(self, redis_url: str, on_cancel: Callable[[str], None]) -> None:
        self._redis: Redis = Redis.from_url(redis_url, decode_responses=True, socket_connect_timeout=2.0)
        self._on_cancel = on_cancel
        self._stop = threading.Event()
        self._warnings = RareWarnings(logger)
        self._thread = threading.Thread(target=self._run, name="live cancels", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except (RedisError, OSError) as error:
                self._warnings.warn(f"listening for cancellations: {error}; trying again")
                self._stop.wait(_RETRY_SECONDS)

    def _listen(self) -> None:
        with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(CANCEL_CHANNEL)
            while not self._stop.is_set():
                message = pubsub.get_message(timeout=_POLL_SECONDS)
                if message is not None:
                    self._on_cancel(str(message["data"]))
