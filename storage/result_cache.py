"""Results that outlive their job, in Redis: bytes under keys of the caller's, for a while."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

logger = logging.getLogger(__name__)

_PREFIX = "headrace:result:"
_SOCKET_SECONDS = 2.0
# After an error, so that whoever has work to do is held up once and not by every batch.
_PAUSE_SECONDS = 10.0
_KEYS_PER_CALL = 128


class ResultCache:
    """Keeps values for `ttl_seconds` after they were last put. A context manager; thread-safe.

    It never raises: while Redis is away, it is empty and keeps nothing.
    """

    def __init__(self, redis_url: str, ttl_seconds: int) -> None:
        self._redis = Redis.from_url(
            redis_url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_SOCKET_SECONDS,
            socket_connect_timeout=_SOCKET_SECONDS,
        )
        self._ttl_seconds = ttl_seconds
        self._not_before = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()

    def get_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """What there is of these keys."""
        found: dict[str, bytes] = {}
        if self._is_away:
            return found
        try:
            for some in _chunks(keys):
                values: list[Any] = self._redis.mget([_PREFIX + key for key in some])
                found |= {key: value for key, value in zip(some, values, strict=True) if value is not None}
        except RedisError as error:
            self._pause(error)
        return found

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """Keep these, in the place of what there is."""
        if self._is_away:
            return
        try:
            for some in _chunks(list(values)):
                with self._redis.pipeline(transaction=False) as pipe:
                    for key in some:
                        pipe.set(_PREFIX + key, values[key], ex=self._ttl_seconds)
                    pipe.execute()
        except RedisError as error:
            self._pause(error)

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._not_before

    def _pause(self, error: RedisError) -> None:
        logger.warning("doing without the result cache for %.0f s: %s", _PAUSE_SECONDS, error)
        self._not_before = time.monotonic() + _PAUSE_SECONDS


def _chunks(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + _KEYS_PER_CALL] for start in range(0, len(keys), _KEYS_PER_CALL))
