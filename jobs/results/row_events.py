"""The tokens of a bulk job's row, for who watches it: from the worker that is at it, or from the stored output."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pyarrow.compute as pc
from anyio.to_thread import run_sync
from redis.exceptions import RedisError

from ...storage.errors import LedgerUnavailable, PartDamaged, PartMissing, StoreUnavailable, UnknownJob
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, PartRecord
from ...storage.output.address import open_folder
from ...storage.output.part_groups import PartGroups
from ..streams.events import StreamError, StreamEvent, StreamUsage
from ..streams.keys import row_stream_id
from ..streams.reader import StreamTimeout, follow
from ..streams.row_watch import TTL_SECONDS, RowWatch
from ..ttl_cache import TtlCache

logger = logging.getLogger(__name__)

# How long no token comes before it is looked for in the stored output; longer each time.
_FIRST_PATIENCE_SECONDS = 0.5
_LONGEST_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
OpenStream = Callable[[str, int, float], AsyncGenerator[StreamEvent, None]]
_COLUMNS = ["output", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "error"]


@dataclass(frozen=True)
class _Output:
    """What the ledger says of a job: how it stands and which parts it has, in the order of their commits."""

    job: JobRecord
    parts: list[PartRecord]


class WatchedOutputs:
    """The outputs of jobs whose rows are watched. Thread-safe; however many ask, the ledger is asked once a second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._outputs: TtlCache[str, _Output] = TtlCache(_LOOK_SECONDS, 0.0)

    def output(self, job_id: str) -> _Output:
        """Raises `LedgerError`, UnknownJob."""
        return self._outputs.get(job_id, lambda: self._read(job_id))

    def _read(self, job_id: str) -> _Output:
        # In this order: a job that has ended by now has all its parts.
        job = self._ledger.job(job_id)
        return _Output(job, self._ledger.parts(job_id))


@dataclass
class StoredRow:
    """One row of a job's output, looked for until it is there: each part once, and once more when the job has ended."""

    outputs: WatchedOutputs
    job_id: str
    row: int
    _last_part: int = 0

    def find(self) -> tuple[dict[str, Any] | None, bool]:
        """What is stored of it, and whether more may come. Raises `LedgerError`, PartDamaged, StoreUnavailable."""
        output = self.outputs.output(self.job_id)
        may_come = not output.job.state.has_ended
        # Two that commit at a time may do so against the order of their ids: in the end all are looked at.
        last = self._last_part if may_come else 0
        new = list(takewhile(lambda part: part.id > last, reversed(output.parts)))
        if new:
            parts = PartGroups(open_folder(output.job.output_dir), [part.file_name for part in new])
            # One that is renamed meanwhile is looked at the next time.
            try:
                for found in parts.tables(_COLUMNS, pc.field("row") == self.row):
                    if found.num_rows:
                        return found.to_pylist()[0], may_come
            except PartMissing:
                return None, True
        self._last_part = max((part.id for part in new), default=self._last_part)
        return None, may_come


@dataclass
class RowEvents:
    """One reader's look at a row. `after`: the number of the last token it has."""

    watch: RowWatch
    stored: StoredRow
    after: int = 0
    _texts: list[str] = field(default_factory=list)
    _began_at: int = field(init=False)
    _renew_at: float = 0.0
    _patience: float = _FIRST_PATIENCE_SECONDS

    def __post_init__(self) -> None:
        self._began_at = self.after

    @property
    def stream_id(self) -> str:
        return row_stream_id(self.stored.job_id, self.stored.row)

    def events(self, redis_url: str) -> Iterator[StreamEvent]:
        """What comes after, up to and including the end: of a finished row that is all there is to tell.

        A row that has not begun is waited for.
        """
        # A reader that has seen a part of it wants the stream first: the stored output has no tokens.
        end = None if self.after else self._end()
        while end is None:
            self._keep_watching()
            try:
                for event in follow(redis_url, self.stream_id, self.after, timeout=self._patience):
                    self._take(event)
                    yield event
                    if event.is_final:
                        return
                    self._keep_watching()
            except StreamTimeout:
                self._lose_patience()
            end = self._end()
        yield end

    async def aevents(self, open_stream: OpenStream) -> AsyncGenerator[StreamEvent, None]:
        """As `events`, for asyncio. `open_stream`: a stream's events after a token, until none comes for so long."""
        end = None if self.after else await run_sync(self._end)
        while end is None:
            await self._keep_watching_aside()
            try:
                streamed = open_stream(self.stream_id, self.after, self._patience)
                async with aclosing(streamed) as events:
                    async for event in events:
                        self._take(event)
                        yield event
                        if event.is_final:
                            return
                        await self._keep_watching_aside()
            except StreamTimeout:
                self._lose_patience()
            end = await run_sync(self._end)
        yield end

    def _take(self, event: StreamEvent) -> None:
        self._patience = _FIRST_PATIENCE_SECONDS
        self.after = event.last
        self._texts.append(event.text)

    def _lose_patience(self) -> None:
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE_SECONDS)

    def _is_to_renew(self) -> bool:
        return time.monotonic() >= self._renew_at

    async def _keep_watching_aside(self) -> None:
        if self._is_to_renew():
            await run_sync(self._keep_watching)

    def _keep_watching(self) -> None:
        if self._is_to_renew():
            # Without Redis there is no stream either, and the stored output is found all the same.
            with suppress(RedisError):
                self.watch.watch(self.stored.job_id, self.stored.row)
                self._renew_at = time.monotonic() + TTL_SECONDS / 3

    def _end(self) -> StreamEvent | None:
        """The last event, made of what is stored; None while the row may still be answered."""
        try:
            found, may_come = self.stored.find()
        except UnknownJob:
            found, may_come = None, False
        except (LedgerUnavailable, StoreUnavailable):
            return None
        except PartDamaged as error:
            logger.warning("row %d is not told of: %s", self.stored.row, error)
            return self._failed("output_damaged", f"a part of job {self.stored.job_id} cannot be read")
        if found is not None:
            return self._stored_end(found)
        return None if may_come else self._failed("not_answered", "the job ended before this row was answered")

    def _stored_end(self, row: dict[str, Any]) -> StreamEvent:
        if row["error"] is not None:
            return self._failed("row_failed", row["error"])
        text, sent = row["output"] or "", "".join(self._texts)
        if self._began_at or not text.startswith(sent):
            return self._failed("stream_expired", "the tokens are not kept any more: read the row's stored output")
        usage = StreamUsage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
        reason = row["finish_reason"]
        return StreamEvent(self.after + 1, finish_reason=reason, text=text.removeprefix(sent), usage=usage)

    def _failed(self, code: str, message: str) -> StreamEvent:
        return StreamEvent(self.after + 1, finish_reason="error", error=StreamError(code, message))
