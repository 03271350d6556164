"""Writes token streams to Redis from a thread of its own, so that the engine never waits for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from redis.exceptions import RedisError

from .connections import Pauses
from .events import RecoveredStream, StreamEnd
from .keys import DEFAULT_TTL_SECONDS, checked
from .link import FlushLink
from .recovery import recover
from .writer import MAX_WAITING_BYTES, StreamWriter

# What a flush brings of each stream is an entry in Redis, a message and a write to a socket: some 0.2 ms for all those
# behind it together. With many streams the tokens of several steps go as one, after at most this long.
_MAX_UPDATES_PER_SECOND = 2000
_LONGEST_WAIT_SECONDS = 0.1

_log = logging.getLogger(__name__)


class _Pass(NamedTuple):
    """Somebody waits until all is in Redis that there was at `mark`; `hurry`: as soon as can be."""

    written: threading.Event
    mark: int
    hurry: bool


class StreamPublisher:
    """One a process; a context manager. Every method may be called from any thread.

    `open`, `append`, `finish` and `release` neither block nor raise, whatever Redis does: while it is away tokens wait
    in memory, some `max_waiting_bytes` at most, beyond which streams are given up. A stream's beginning and its end are
    written at once, what lies between the less often the more streams there are, and at least ten times a second. A
    stream that a later attempt has claimed is given up, too; what is still called for it does nothing.
    """

    def __init__(
        self, redis_url: str, ttl_seconds: int = DEFAULT_TTL_SECONDS, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._redis_url, self._ttl_seconds = redis_url, ttl_seconds
        self._max_waiting_bytes = max_waiting_bytes
        self._link = FlushLink(redis_url, ttl_seconds)
        self._writer = StreamWriter(self._link, ttl_seconds)
        # The thread does these calls in their order; what came during a flush goes into the next one.
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._awake, self._closing = threading.Event(), threading.Event()
        self._pauses = Pauses()
        self._next_flush = 0.0
        self._passes: list[_Pass] = []
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)

    def open(
        self,
        stream_id: str,
        attempt: int,
        reply_to: str | None = None,
        recovered: RecoveredStream | None = None,
    ) -> None:
        """Begin to write as this attempt (counted from 1); earlier attempts are refused from then on.

        The first token appended has the number after `recovered` (what `recover` said of this stream), or 1: tokens
        that the stream already has are then skipped by number. `reply_to` is the reader to which frames go.
        Raises StreamIdError for ids that are none.
        """
        checked(stream_id)
        if reply_to is not None:
            checked(reply_to)
        self._call(self._writer.open, stream_id, attempt, reply_to, recovered)

    def append(
        self,
        stream_id: str,
        token_ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[Any] | None = None,
        prompt_logprobs: Sequence[Any] | None = None,
        attempt: int | None = None,
    ) -> None:
        """Add tokens, with the text that each one added.

        `logprobs` has something for JSON about each, in every call for a stream or in none, `prompt_logprobs` something
        about the prompt, for the stream's first entry. The sequences are kept: they must not be changed afterwards.
        `attempt`: whose tokens these are, here and below; nothing of them where a later one has opened the stream.
        """
        assert len(token_ids) == len(texts), "not a text a token"
        self._call(self._writer.append, stream_id, token_ids, texts, logprobs, prompt_logprobs, attempt)

    def finish(self, stream_id: str, end: StreamEnd, attempt: int | None = None) -> None:
        """End the stream."""
        self._call(self._writer.finish, stream_id, end, attempt)

    def release(self, stream_id: str, attempt: int | None = None) -> None:
        """Write what there is and forget the stream without an end: another attempt will go on."""
        self._call(self._writer.release, stream_id, attempt)

    def recover(self, attempts: Mapping[str, int], timeout_seconds: float = 10.0) -> dict[str, RecoveredStream]:
        """Claim each stream for its attempt and say what earlier ones wrote; blocks.

        From then on no earlier attempt can add anything. Streams that a later attempt has claimed are left out.
        Raises redis' errors when it does not answer in time.
        """
        return recover(self._redis_url, self._ttl_seconds, attempts, timeout_seconds)

    def flush(self, timeout_seconds: float, hurry: bool = True) -> bool:
        """Wait until all that was called before is in Redis; False when it is not in time.

        Without `hurry` it is written no sooner than it would have been.
        """
        written = threading.Event()
        self._call(self._pass, written, hurry)
        return written.wait(timeout_seconds)

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Write what there is, for as long as this, and end the thread. Harmless when repeated."""
        if self._closing.is_set() or not self._thread.is_alive():
            return
        if not self.flush(timeout_seconds):
            _log.warning("Redis does not answer: the ends of some token streams are not written")
        self._closing.set()
        self._awake.set()
        self._thread.join(timeout_seconds)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, do: Callable[..., None], *arguments: Any) -> None:
        self._calls.append((do, arguments))
        # Setting an event takes a lock, asking it does not.
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        with self._link:
            while not self._closing.is_set():
                self._awake.wait()
                self._awake.clear()
                self._write_all()

    def _write_all(self) -> None:
        self._do_calls()
        while self._writer.is_behind and not self._closing.is_set():
            left = 0.0 if any(each.hurry for each in self._passes) else self._next_flush - time.monotonic()
            if left <= 0 or self._writer.has_urgent:
                self._flush(only_urgent=left > 0)
            else:
                self._awake.wait(left)
                self._awake.clear()
            self._do_calls()

    def _do_calls(self) -> None:
        while self._calls:
            do, arguments = self._calls.popleft()
            self._do(do, arguments)
        self._let_pass()

    def _do(self, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            do(*arguments)
        except Exception:  # noqa: BLE001
            # One answer with something unfit for JSON must not end the streams of all others.
            _log.exception("stream %s can not be written", arguments[0])
            self._writer.forget(arguments[0])

    def _flush(self, only_urgent: bool) -> None:
        start = time.monotonic()
        try:
            num_updates = self._writer.flush(only_urgent)
        # No file can be opened, for one: redis-py itself reads some.
        except (RedisError, OSError) as error:
            if self._pauses.are_short:
                _log.warning("token streams wait for Redis: %s", error)
            self._writer.give_up_beyond(self._max_waiting_bytes)
            self._closing.wait(self._pauses.next())
        else:
            self._pauses.reset()
            if not only_urgent:
                self._next_flush = start + min(num_updates / _MAX_UPDATES_PER_SECOND, _LONGEST_WAIT_SECONDS)

    def _pass(self, written: threading.Event, hurry: bool) -> None:
        self._passes.append(_Pass(written, self._writer.mark(), hurry))

    def _let_pass(self) -> None:
        """Tell those who wait for what is written by now."""
        if self._passes:
            waiting = [each for each in self._passes if not self._writer.is_past(each.mark)]
            for each in self._passes:
                if each not in waiting:
                    each.written.set()
            self._passes = waiting
