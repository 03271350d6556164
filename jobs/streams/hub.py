"""Follows thousands of token streams over two connections: for an API process."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Self

from redis.exceptions import RedisError

from .connections import connect_async, in_time
from .cursor import Cursor, early_end
from .events import StreamEvent
from .fetcher import Fetcher, HubClosed
from .follower import Follower
from .keys import STREAM_PREFIX, frames_channel, new_reader_id, stream_channel
from .subscriber import Subscriber

__all__ = ["HubClosed", "StreamHub"]

# What was lost on the way without anybody noticing is found after at most twice this long.
_CHECK_SECONDS = 5.0

_log = logging.getLogger(__name__)


class StreamHub:
    """An asyncio context manager, for the event loop that enters it; one connection listens, the other one reads.

    Requests that name `reader_id` as their `reply_to` have their tokens sent here in one message a flush. A slow
    consumer costs no memory: what it has not taken in time it reads from Redis.
    """

    def __init__(self, redis_url: str) -> None:
        # What a request names as its `reply_to`; stays the same through all reconnections.
        self.reader_id = new_reader_id()
        self._frames = frames_channel(self.reader_id)
        self._redis = connect_async(redis_url)
        self._fetcher = Fetcher(self._redis)
        self._subscriber = Subscriber(self._redis, self._on_message, self._on_subscribed)
        self._followers: dict[str, list[Follower]] = {}
        # What has come of streams that somebody is about to follow from their beginning.
        self._expected: dict[str, list[StreamEvent]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_waiting_events(self) -> int:
        """How many events wait in memory for their consumers."""
        return sum(follower.num_waiting for followers in self._followers.values() for follower in followers)

    def expect(self, stream_id: str) -> None:
        """Announce a framed stream that nobody has begun to write: it is followed without being read first.

        Thread-safe. Whoever does not follow it in the end says `forget`.
        """
        self._expected[stream_id] = []

    def forget(self, stream_id: str) -> None:
        """Expect a stream no longer; harmless when it is followed, or was never expected. Thread-safe."""
        self._expected.pop(stream_id, None)

    async def events(
        self, stream_id: str, after: int = 0, *, framed: bool = False, timeout: float | None = None
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield what comes after the token `after`, up to and including the stream's end.

        `framed` says that the request named `reader_id` as its `reply_to`; any other stream is followed by its
        channel. Raises StreamTimeout after `timeout` seconds without an event, HubClosed
        when the hub is closed meanwhile, and StreamIdError.
        """
        cursor = Cursor(stream_id, after, timeout)
        come = None if after else self._expected.pop(stream_id, None)
        follower = Follower(cursor, framed, is_behind=come is None)
        self._add(stream_id, follower)
        for early in come or ():
            follower.push(early)
        try:
            while not cursor.ended:
                while (event := follower.take()) is not None:
                    yield event
                    cursor.restart_clock()
                if not cursor.ended:
                    for event in await self._more(follower):
                        yield event
                        cursor.restart_clock()
        finally:
            self._remove(stream_id, follower)

    async def __aenter__(self) -> Self:
        self._subscriber.subscribe(self._frames)
        self._tasks = [asyncio.create_task(run) for run in (self._subscriber.run(), self._fetcher.run(), self._check())]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._fetcher.close()
        for followers in self._followers.values():
            for follower in followers:
                follower.doubt()
        await self._redis.aclose()

    def _add(self, stream_id: str, follower: Follower) -> None:
        followers = self._followers.setdefault(stream_id, [])
        if not follower.framed and all(other.framed for other in followers):
            self._subscriber.subscribe(stream_channel(stream_id))
        followers.append(follower)

    def _remove(self, stream_id: str, follower: Follower) -> None:
        follower.close()
        followers = self._followers[stream_id]
        followers.remove(follower)
        if not follower.framed and all(other.framed for other in followers):
            self._subscriber.unsubscribe(stream_channel(stream_id))
        if not followers:
            del self._followers[stream_id]

    async def _more(self, follower: Follower) -> list[StreamEvent]:
        """Wait for news, or read the stream where that is needed. Raises StreamTimeout."""
        if not follower.behind:
            await follower.wait()
            return []
        left = follower.cursor.remaining()
        with suppress(TimeoutError):
            async with asyncio.timeout(left if math.isfinite(left) else None):
                return await self._catch_up(follower)
        follower.cursor.remaining()
        return []

    async def _catch_up(self, follower: Follower) -> list[StreamEvent]:
        cursor = follower.cursor
        follower.catch_up()
        try:
            found = await self._fetcher.fetch(cursor.key, cursor.last)
        except BaseException:
            follower.doubt()
            raise
        events = [event for event in map(cursor.take, found.events) if event is not None]
        cursor.restart_clock(bool(events))
        follower.caught_up(found.more)
        if not events and cursor.has_only_said:
            with suppress(RedisError):
                async with in_time():
                    return early_end(cursor, await self._redis.xrevrange(cursor.key, count=1))
        return events

    def _on_message(self, channel: str, data: bytes) -> None:
        if channel == self._frames:
            self._on_frame(data)
        else:
            for follower in self._of_channel(channel):
                follower.doubt()

    def _on_frame(self, data: bytes) -> None:
        try:
            for stream_id, entry_id, fields in json.loads(data):
                if followers := self._followers.get(stream_id):
                    event = StreamEvent.from_frame(entry_id, fields)
                    for follower in followers:
                        follower.push(event)
                elif (come := self._expected.get(stream_id)) is not None:
                    come.append(StreamEvent.from_frame(entry_id, fields))
        except (ValueError, KeyError, TypeError):
            _log.exception("a frame that can not be read: the streams are read instead")
            self._on_subscribed(self._frames)

    def _on_subscribed(self, channel: str) -> None:
        # What was published before is gone, but it is in the streams.
        if channel == self._frames:
            self._expected.clear()
        for follower in self._of_channel(channel):
            follower.doubt()

    def _of_channel(self, channel: str) -> list[Follower]:
        if channel == self._frames:
            return [follower for followers in self._followers.values() for follower in followers if follower.framed]
        followers = self._followers.get(channel.removeprefix(STREAM_PREFIX), ())
        return [follower for follower in followers if not follower.framed]

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for follower in [follower for followers in self._followers.values() for follower in followers]:
                if follower.is_quiet:
                    follower.doubt()
                follower.is_quiet = True
