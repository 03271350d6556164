"""Connections to Redis whose failures their users handle, and how long these wait before they try again."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

# A server that does not answer for so long is taken for gone; far more than any command here takes.
SOCKET_TIMEOUT_SECONDS = 5.0
# Errors that pass when Redis is back; one that still loads its data is among them.
UNREACHABLE = (RedisConnectionError, RedisTimeoutError, MasterDownError)
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


class Pauses:
    """How long to wait between attempts to reach Redis: longer each time, not in step with others."""

    def __init__(self) -> None:
        self._next = _SHORTEST_PAUSE_SECONDS

    def next(self) -> float:
        """Seconds to wait after another failure."""
        pause = self._next
        self._next = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return pause * random.uniform(0.5, 1.0)

    @property
    def are_short(self) -> bool:
        """Whether none was made since Redis last answered."""
        return self._next == _SHORTEST_PAUSE_SECONDS

    def reset(self) -> None:
        """Begin again with short ones: Redis has answered."""
        self._next = _SHORTEST_PAUSE_SECONDS


def connect(redis_url: str) -> Redis:
    """A client that leaves trying again to its caller."""
    timeout = SOCKET_TIMEOUT_SECONDS
    retry = Retry(NoBackoff(), 0)
    return Redis.from_url(redis_url, protocol=2, retry=retry, socket_timeout=timeout, socket_connect_timeout=timeout)


def connect_async(redis_url: str) -> AsyncRedis:
    """As `connect`, for asyncio. Whoever uses it has to use `in_time`."""
    # With a timeout redis-py sends through asyncio.wait_for, which in Python 3.11 may swallow a cancellation.
    retry = AsyncRetry(NoBackoff(), 0)
    return AsyncRedis.from_url(
        redis_url, protocol=2, retry=retry, socket_timeout=None, socket_connect_timeout=SOCKET_TIMEOUT_SECONDS
    )


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Raises redis' TimeoutError when what is inside takes longer than a server that is there does."""
    try:
        async with asyncio.timeout(SOCKET_TIMEOUT_SECONDS) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RedisTimeoutError(f"no answer in {SOCKET_TIMEOUT_SECONDS:.0f} s") from error
