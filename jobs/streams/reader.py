"""Follows one token stream: each token once and in order, whatever happens to the connection or to Redis."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import AuthenticationError

from .connections import SOCKET_TIMEOUT_SECONDS, UNREACHABLE, Pauses, connect, connect_async, in_time
from .cursor import Cursor, StreamTimeout, early_end, entries
from .events import StreamEvent

__all__ = ["StreamTimeout", "afollow", "follow"]

# Below the time after which a silent connection is taken for dead.
_BLOCK_SECONDS = 2.0
# A late reader gets many entries at once, but not an answer of a hundred megabytes.
_MAX_ENTRIES = 500

_log = logging.getLogger(__name__)


def follow(
    redis: str | Redis, stream_id: str, after: int = 0, timeout: float | None = None
) -> Generator[StreamEvent, None, None]:
    """Yield what comes after the token `after`, up to and including the stream's end; waits for a stream not yet there.

    `redis` is a URL or a client, whose pool is used. Raises StreamTimeout after `timeout` seconds without an event,
    also when Redis does not answer for so long, and StreamIdError.
    """
    cursor, pauses = Cursor(stream_id, after, timeout), Pauses()
    with _client(redis) as client:
        while not cursor.ended:
            try:
                found = _read(client, cursor)
                pauses.reset()
            except UNREACHABLE as error:
                time.sleep(_pause(cursor, pauses, error))
                continue
            yield from found
            cursor.restart_clock(bool(found))


async def afollow(
    redis: str | AsyncRedis, stream_id: str, after: int = 0, timeout: float | None = None
) -> AsyncGenerator[StreamEvent, None]:
    """As `follow`, for asyncio."""
    cursor, pauses = Cursor(stream_id, after, timeout), Pauses()
    async with _async_client(redis) as client:
        while not cursor.ended:
            try:
                async with in_time():
                    found = await _aread(client, cursor)
                pauses.reset()
            except UNREACHABLE as error:
                await asyncio.sleep(_pause(cursor, pauses, error))
                continue
            for event in found:
                yield event
            cursor.restart_clock(bool(found))


def _read(client: Redis, cursor: Cursor) -> list[StreamEvent]:
    reply = client.xread({cursor.key: cursor.entry_id}, _MAX_ENTRIES, _block_ms(client, cursor))
    if reply or not cursor.has_only_said:
        return _new(cursor, reply)
    return early_end(cursor, client.xrevrange(cursor.key, count=1))


async def _aread(client: AsyncRedis, cursor: Cursor) -> list[StreamEvent]:
    reply = await client.xread({cursor.key: cursor.entry_id}, _MAX_ENTRIES, _block_ms(client, cursor))
    if reply or not cursor.has_only_said:
        return _new(cursor, reply)
    return early_end(cursor, await client.xrevrange(cursor.key, count=1))


def _block_ms(client: Redis | AsyncRedis, cursor: Cursor) -> int:
    # A client gives up on a connection that is silent for longer than its timeout.
    patience = client.connection_pool.connection_kwargs.get("socket_timeout") or SOCKET_TIMEOUT_SECONDS
    # 0 would be for ever.
    return max(1, int(min(cursor.remaining(), _BLOCK_SECONDS, patience / 2) * 1000))


def _new(cursor: Cursor, reply: Any) -> list[StreamEvent]:
    taken = map(cursor.take, entries(reply))
    return [event for event in taken if event is not None]


def _pause(cursor: Cursor, pauses: Pauses, error: Exception) -> float:
    if isinstance(error, AuthenticationError):
        raise error
    if pauses.are_short:
        _log.warning("%s waits for Redis: %s", cursor.key, error)
    try:
        return min(cursor.remaining(), pauses.next())
    except StreamTimeout as timeout:
        raise timeout from error


@contextmanager
def _client(redis: str | Redis) -> Iterator[Redis]:
    if not isinstance(redis, str):
        yield redis
        return
    with connect(redis) as client:
        yield client


@asynccontextmanager
async def _async_client(redis: str | AsyncRedis) -> AsyncIterator[AsyncRedis]:
    if not isinstance(redis, str):
        yield redis
        return
    async with connect_async(redis) as client:
        yield client
