"""Which rows of bulk jobs somebody watches: readers say so in Redis, workers look there for the jobs they are at."""

from collections.abc import Collection
from typing import Self

from ..broker.redis_access import server_time, text_client
from .keys import watch_key

# A reader says it again while it waits; without that nobody is taken to watch any more.
TTL_SECONDS = 30.0
_REDIS_SECONDS = 2.0


class RowWatch:
    """Keys `headrace:watch:<job>`; members are row numbers, scores seconds of the Redis server's clock.

    Thread-safe; a context manager. Its methods raise redis' errors.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = text_client(redis_url, _REDIS_SECONDS)

    def watch(self, job_id: str, row: int) -> None:
        """Ask for a row's tokens for the next `TTL_SECONDS`."""
        now = server_time(self._redis)
        with self._redis.pipeline() as pipe:
            pipe.zremrangebyscore(watch_key(job_id), 0, now)
            pipe.zadd(watch_key(job_id), {str(row): now + TTL_SECONDS})
            pipe.pexpire(watch_key(job_id), int(TTL_SECONDS * 1000))
            pipe.execute()

    def watched(self, job_ids: Collection[str]) -> set[tuple[str, int]]:
        """The rows of these jobs that somebody watches."""
        names = sorted(job_ids)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for job_id in names:
                pipe.zrange(watch_key(job_id), 0, -1, withscores=True)
            (seconds, _), *found = pipe.execute()
        return {
            (job_id, int(row))
            for job_id, rows in zip(names, found, strict=True)
            for row, until in rows
            if until > float(seconds)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()
