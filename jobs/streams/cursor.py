"""How far one reader has come in a stream: the same for every way of reading it."""

import math
import time
from collections.abc import Iterator
from typing import Any

from .events import StreamEvent
from .keys import stream_key


class StreamTimeout(TimeoutError):
    """Nothing new came for as long as the reader was willing to wait.

    `has_looked`: Redis said so meanwhile; else it may have been away all the time, and the stream have more.
    """

    def __init__(self, message: str, has_looked: bool) -> None:
        super().__init__(message)
        self.has_looked = has_looked


class Cursor:
    """Knows the last token that was read and when to give up; does no I/O."""

    def __init__(self, stream_id: str, after: int, timeout: float | None) -> None:
        self.key = stream_key(stream_id)
        self.last = after
        self.ended = False
        # Whether it stands where the reader said, and nothing has shown that the stream has so many tokens.
        self.has_only_said = after > 0
        self._timeout = timeout
        self._deadline: float | None = None
        self.restart_clock()

    @property
    def entry_id(self) -> str:
        """What to read after: the end of the stream has an id behind that of its last token."""
        return f"{self.last}-0"

    def take(self, event: StreamEvent) -> StreamEvent | None:
        """What of the event is new; the cursor moves behind it."""
        rest = None if self.ended else event.after(self.last)
        if rest is not None:
            self.has_only_said = False
            self.last, self.ended = max(self.last, rest.last), rest.is_final
        return rest

    def restart_clock(self, due: bool = True) -> None:
        """Redis has answered: wait for the whole time again, if that is due.

        Then events were taken, and whoever takes them has the time.
        """
        self._has_looked = not due
        if due:
            self._deadline = None if self._timeout is None else time.monotonic() + self._timeout

    def remaining(self) -> float:
        """How many seconds to wait for more, perhaps infinitely many. Raises StreamTimeout when there are none left."""
        if self._deadline is None:
            return math.inf
        left = self._deadline - time.monotonic()
        if left <= 0:
            waited = f"nothing new in {self.key} after token {self.last} for {self._timeout} s"
            raise StreamTimeout(waited, self._has_looked)
        return left


def entries(reply: Any) -> Iterator[StreamEvent]:
    """The events in what redis-py makes of an answer to XREAD of one stream, in either protocol, decoded or not."""
    for _, found in items(reply):
        for entry_id, fields in found:
            yield event_of(entry_id, fields)


def items(reply: Any) -> Iterator[tuple[str, list[Any]]]:
    """The streams in an answer to XREAD and the entries of each."""
    if isinstance(reply, dict):
        # RESP3 has the lists of entries in a list of their own.
        for key, lists in reply.items():
            yield _text(key), lists[0]
        return
    for key, found in reply or ():
        yield _text(key), found


def event_of(entry_id: Any, fields: Any) -> StreamEvent:
    """One entry."""
    return StreamEvent.from_entry(_text(entry_id), {_text(name): _text(value) for name, value in fields.items()})


def early_end(cursor: Cursor, newest: Any) -> list[StreamEvent]:
    """The end of a stream with fewer tokens than its reader says it has: XREAD finds nothing after those.

    `newest` is the answer to XREVRANGE. What ended in the meantime, with tokens to be read before, is left to XREAD.
    """
    events = [event_of(*entry) for entry in newest or ()]
    return [event for event in events if event.is_final and event.last <= cursor.last and cursor.take(event)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
