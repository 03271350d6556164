"""All streams that this process writes, and what Redis still lacks of them. Belongs to the publisher's thread."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .events import RecoveredStream, StreamEnd, StreamError
from .keys import is_request
from .link import FlushLink
from .outgoing import Operation, OutgoingStream

# One call of the script must not hold up Redis, nor a reader with one frame.
MAX_FLUSH_BYTES = 1_000_000
# Redis that fsyncs every second may forget the last ones when it dies: what ended in them is written again.
REMEMBER_SECONDS = 10.0
# How much may wait while Redis is away: some 17 million tokens, fewer with logprobs.
MAX_WAITING_BYTES = 256 * 2**20
_GIVEN_UP = StreamError("stream_lost", "Redis was away for too long to keep the answer: ask again")

_log = logging.getLogger(__name__)


class StreamWriter:
    """Knows of each stream what Redis has and brings it there."""

    def __init__(self, link: FlushLink, ttl_seconds: int) -> None:
        self._link = link
        self._renew_seconds = ttl_seconds / 10
        self._streams: dict[str, OutgoingStream] = {}
        # Those with something that Redis may lack, in the order in which they got it.
        self._behind: dict[str, OutgoingStream] = {}
        # Of those: the ones that readers wait for most, at their streams' beginnings and ends.
        self._urgent: dict[str, OutgoingStream] = {}
        # When each of those came to be behind, in a count that only grows.
        self._since: dict[str, int] = {}
        self._count = count()
        self._ended: deque[tuple[float, OutgoingStream]] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether Redis may lack something."""
        return bool(self._behind)

    @property
    def has_urgent(self) -> bool:
        """Whether Redis may lack a stream's beginning or its end."""
        return bool(self._urgent)

    def mark(self) -> int:
        """This moment, for `is_past`."""
        return next(self._count)

    def is_past(self, mark: int) -> bool:
        """Whether Redis has all that there was at that moment."""
        return min(self._since.values(), default=mark) >= mark

    def open(self, stream_id: str, attempt: int, reply_to: str | None, recovered: RecoveredStream | None) -> None:
        known = self._streams.get(stream_id)
        if known is not None and not known.is_closed and known.attempt > attempt:
            # Of a worker that was starved and has taken up its own again: the earlier attempt goes on for a while.
            return
        stream = OutgoingStream(stream_id, attempt, reply_to, recovered)
        self._streams[stream_id] = stream
        self._fell_behind(stream, urgent=True)

    def append(
        self,
        stream_id: str,
        token_ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[Any] | None,
        prompt_logprobs: Sequence[Any] | None,
        attempt: int | None,
    ) -> None:
        if (stream := self._of(stream_id, attempt)) is not None:
            stream.append(token_ids, texts, logprobs, prompt_logprobs)
            self._fell_behind(stream, urgent=not stream.num_sent)

    def finish(self, stream_id: str, end: StreamEnd, attempt: int | None) -> None:
        if (stream := self._of(stream_id, attempt)) is not None:
            stream.finish(end)
            self._fell_behind(stream, urgent=True)

    def release(self, stream_id: str, attempt: int | None) -> None:
        if (stream := self._of(stream_id, attempt)) is not None:
            stream.released = True
            self._fell_behind(stream, urgent=True)

    def _of(self, stream_id: str, attempt: int | None) -> OutgoingStream | None:
        """One to which this attempt may add: it has no end, and no later attempt has claimed it, here or elsewhere."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_closed or (attempt is not None and attempt != stream.attempt):
            return None
        return stream

    def forget(self, stream_id: str) -> None:
        """Write nothing more of it."""
        self._streams.pop(stream_id, None)
        self._caught_up(stream_id)

    def give_up_beyond(self, max_bytes: int) -> None:
        """While Redis takes nothing: keep no more than that of what it lacks, of as many streams as can be.

        A bulk row's stream is forgotten, as its text will be in the data set; a live request's ends with an error.
        """
        waiting = {stream: stream.num_waiting_bytes for stream in self._behind.values()}
        excess, given_up = sum(waiting.values()) - max_bytes, 0
        if excess <= 0:
            return
        for stream in sorted(waiting, key=lambda stream: (is_request(stream.stream_id), -waiting[stream])):
            if excess > 0 and waiting[stream]:
                self._give_up(stream)
                excess, given_up = excess - waiting[stream], given_up + 1
        _log.warning("%d token streams are given up: more than %d bytes wait for Redis", given_up, max_bytes)

    def _give_up(self, stream: OutgoingStream) -> None:
        if stream.released or not is_request(stream.stream_id):
            self.forget(stream.stream_id)
        else:
            stream.give_up(_GIVEN_UP)

    def flush(self, only_urgent: bool = False) -> int:
        """Bring Redis what it lacks, or the first megabyte of it, in one call; of how many streams.

        `only_urgent`: no more than streams' beginnings and ends. Raises redis' errors and OSError; try again then.
        """
        now = time.monotonic()
        batch, owners, operations = self._next_batch((self._urgent if only_urgent else self._behind).values(), now)
        if not batch:
            return 0
        try:
            refused = {owners[index]: reason for index, reason in reversed(self._link.run(operations))}
        except (RedisError, OSError):
            self._distrust()
            raise
        for stream in batch:
            if stream not in refused:
                self._written(stream, now)
        self._forget_ended(now)
        self._resolve(refused)
        return len(batch)

    def _fell_behind(self, stream: OutgoingStream, urgent: bool) -> None:
        stream_id = stream.stream_id
        self._behind[stream_id] = stream
        if stream_id not in self._since:
            self._since[stream_id] = next(self._count)
        if urgent:
            self._urgent[stream_id] = stream

    def _caught_up(self, stream_id: str) -> None:
        for known in (self._behind, self._urgent, self._since):
            known.pop(stream_id, None)

    def _next_batch(
        self, streams: Iterable[OutgoingStream], now: float
    ) -> tuple[list[OutgoingStream], list[OutgoingStream], list[Operation]]:
        """Streams that are behind, the operations for them and the stream of each operation."""
        batch, owners, operations, num_bytes = [], [], [], 0
        for stream in streams:
            wanted = stream.operations()
            if now - stream.renewed_at > self._renew_seconds:
                wanted.append(stream.renewal())
                stream.renewed_at = now
            batch.append(stream)
            owners += [stream] * len(wanted)
            operations += wanted
            num_bytes += sum(len(operation.data) for operation in wanted)
            if num_bytes > MAX_FLUSH_BYTES:
                break
        return batch, owners, operations

    def _written(self, stream: OutgoingStream, now: float) -> None:
        stream.sent()
        self._caught_up(stream.stream_id)
        if stream.has_end:
            self._ended.append((now, stream))
        elif stream.released:
            self.forget(stream.stream_id)

    def _resolve(self, refused: dict[OutgoingStream, str]) -> None:
        """See what became of streams that are not where they were thought to be. Raises ResponseError."""
        failure = ""
        for stream, reason in refused.items():
            if reason.startswith("error") and "WRONGTYPE" not in reason:
                failure = reason
            elif not reason[0].isdigit():
                _log.warning("stream %s is given up: %s", stream.stream_id, reason)
                self.forget(stream.stream_id)
            elif reason.endswith("-1"):
                self._found_ended(stream)
            else:
                self._found_at(stream, int(reason.partition("-")[0]))
        if failure:
            self._distrust()
            raise ResponseError(failure)

    def _found_ended(self, stream: OutgoingStream) -> None:
        # Ours, when the answer to an earlier flush was lost; otherwise there is nothing left to write.
        if not stream.has_end:
            _log.warning("stream %s is given up: it has ended", stream.stream_id)
        self.forget(stream.stream_id)

    def _found_at(self, stream: OutgoingStream, num_tokens: int) -> None:
        if num_tokens < stream.num_sent:
            _log.warning("stream %s has lost tokens: writing it again from %d", stream.stream_id, num_tokens + 1)
            self._distrust()
        stream.seek(num_tokens)
        self._fell_behind(stream, urgent=True)

    def _distrust(self) -> None:
        """Look at every stream again: Redis may have lost some of any."""
        for stream in self._streams.values():
            stream.needs_claim = True
            self._fell_behind(stream, urgent=False)

    def _forget_ended(self, now: float) -> None:
        while self._ended and now - self._ended[0][0] > REMEMBER_SECONDS:
            _, stream = self._ended.popleft()
            if self._streams.get(stream.stream_id) is stream:
                self.forget(stream.stream_id)
