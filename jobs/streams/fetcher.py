"""Reads many streams over one connection: what readers want at the same time is one command."""

import asyncio
import logging
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .connections import UNREACHABLE, Pauses, in_time
from .cursor import event_of, items
from .events import StreamEvent

# Parsing an answer holds up the event loop: this many entries take some 40 ms.
_MAX_ENTRIES_PER_ANSWER = 2048
_MAX_STREAMS_PER_COMMAND = 256
# What a consumer holds that reads from Redis.
_MAX_ENTRIES_PER_STREAM = 256

_log = logging.getLogger(__name__)


class HubClosed(Exception):
    """A stream was being followed when its hub was closed."""


class Fetched(NamedTuple):
    """The next events of a stream; `more` when there may be further ones already."""

    events: list[StreamEvent]
    more: bool


class _Wish(NamedTuple):
    key: str
    last: int
    answer: asyncio.Future[Fetched]


class Fetcher:
    """For one event loop, in which `run` runs as a task."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._wishes: list[_Wish] = []
        self._wanted = asyncio.Event()
        self._pauses = Pauses()
        self._answers: set[asyncio.Future[Fetched]] = set()
        self._is_closed = False

    async def fetch(self, key: str, last: int) -> Fetched:
        """What the stream has after the token `last`; waits while Redis is away. Raises redis' other errors, HubClosed.

        Some of the events may be older: others may have wanted the same stream from an earlier token.
        """
        if self._is_closed:
            raise HubClosed
        answer: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        self._wishes.append(_Wish(key, last, answer))
        self._wanted.set()
        return await answer

    def close(self) -> None:
        """Answer nobody any more; `run` has ended."""
        self._is_closed = True
        for answer in list(self._answers):
            if not answer.done():
                answer.set_exception(HubClosed())

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._wishes:
                now, self._wishes = self._wishes[:_MAX_STREAMS_PER_COMMAND], self._wishes[_MAX_STREAMS_PER_COMMAND:]
                await self._answer(now)

    async def _answer(self, wishes: list[_Wish]) -> None:
        try:
            found = await self._read(wishes)
        except UNREACHABLE as error:
            if self._pauses.are_short:
                _log.warning("token streams wait for Redis: %s", error)
            self._wishes += [wish for wish in wishes if not wish.answer.done()]
            await asyncio.sleep(self._pauses.next())
            return
        except RedisError as error:
            for wish in wishes:
                if not wish.answer.done():
                    wish.answer.set_exception(error)
            return
        self._pauses.reset()
        for wish in wishes:
            # Whoever wanted it may have been cancelled.
            if not wish.answer.done():
                wish.answer.set_result(found.get(wish.key, Fetched([], False)))

    async def _read(self, wishes: list[_Wish]) -> dict[str, Fetched]:
        lasts: dict[str, int] = {}
        for wish in wishes:
            lasts[wish.key] = min(wish.last, lasts.get(wish.key, wish.last))
        count = min(_MAX_ENTRIES_PER_ANSWER // len(lasts), _MAX_ENTRIES_PER_STREAM)
        async with in_time():
            reply = await self._redis.xread({key: f"{last}-0" for key, last in lasts.items()}, count)
        return {
            key: Fetched([event_of(*entry) for entry in entries], len(entries) == count)
            for key, entries in items(reply)
        }
