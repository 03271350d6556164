"""One consumer of a stream hub, and the events that it has not taken yet."""

import asyncio
import math
from collections import deque

from .cursor import Cursor
from .events import StreamEvent

# A slow consumer keeps no more than this many events waiting; it reads the rest from Redis when it comes to it.
MAX_WAITING_EVENTS = 64


class Follower:
    """For one event loop. `push` gets what comes in; `behind` says that the stream itself has to be read."""

    def __init__(self, cursor: Cursor, framed: bool, is_behind: bool = True) -> None:
        self.cursor = cursor
        self.framed = framed
        self.behind = is_behind
        # Whether nothing has come for a while: then the hub makes sure.
        self.is_quiet = False
        self._waiting: deque[StreamEvent] = deque()
        self._last = cursor.last
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def push(self, event: StreamEvent) -> None:
        """Keep the event for the consumer, unless some are missing before it or too many wait already."""
        self.is_quiet = False
        if self.behind:
            return
        if event.first > self._last + 1 or len(self._waiting) >= MAX_WAITING_EVENTS:
            self.behind = True
        else:
            self._waiting.append(event)
            self._last = max(self._last, event.last)
        self._news.set()

    def doubt(self) -> None:
        """There may be something in the stream that did not come by `push`."""
        self.behind = True
        self._news.set()

    def take(self) -> StreamEvent | None:
        """The next new event that waits; the cursor moves behind it."""
        while self._waiting:
            if (event := self.cursor.take(self._waiting.popleft())) is not None:
                return event
        return None

    def catch_up(self) -> None:
        """The stream is about to be read from the cursor on: what is pushed from now on follows that."""
        self.behind = False
        self._last = self.cursor.last

    def caught_up(self, more: bool) -> None:
        """The stream has been read up to the cursor; `more` when it may already have gone on."""
        self.behind |= more
        self._last = max(self._last, self.cursor.last)

    async def wait(self) -> None:
        """Wait until there may be something new, or the time may be up: the cursor knows. Raises StreamTimeout."""
        left = self.cursor.remaining()
        # One for many waits: events come far more often than time runs out, and each sets the clock anew.
        if self._timer is None and math.isfinite(left):
            self._timer = asyncio.get_running_loop().call_later(left, self._look_at_clock)
        await self._news.wait()
        self._news.clear()

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_at_clock(self) -> None:
        self._timer = None
        self._news.set()
