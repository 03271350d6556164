"""The worker's side of watched rows: their tokens, those so far and those to come, go out as streams.

A row that nobody watches is not looked at: the engine's host is told of those that are, and only then.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from ...engine.request import RequestEvent
from ...engine.text.tokenizer import Tokenizer
from ...storage.ledger.records import Claim
from ..hosting.engine_host import EngineHost
from ..hosting.outcomes import EngineFailure, Outcome, Refusal
from ..live.answer import LiveSample
from ..live.in_batches import InBatches
from ..live.text import GrowingText
from ..streams.events import StreamError
from ..streams.keys import row_stream_id
from ..streams.publisher import StreamPublisher
from ..streams.row_watch import RowWatch
from .row_batch import RowBatch

LOOK_SECONDS = 0.25
_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class _Offer:
    """Rows that an attempt has handed to the engine. `samples`: of those that are watched, by their requests' ids."""

    claim: Claim
    batch: RowBatch
    samples: dict[str, LiveSample] = field(default_factory=dict)


@dataclass(frozen=True)
class _News:
    """What the engine tells of a watched row."""

    offer: _Offer
    request_id: str
    what: RequestEvent | Outcome


@dataclass(frozen=True)
class _Over:
    """An attempt has ended: streams that have not are left to the next one."""

    offer: _Offer


@dataclass
class RowStreams:
    """One a worker; a context manager. `look` is to be called every `LOOK_SECONDS`, from one thread."""

    host: EngineHost
    tokenizer: Tokenizer
    publisher: StreamPublisher
    watch: RowWatch
    _offers: list[_Offer] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._news = InBatches[_News | _Over]("row streams", self._handle_all, _TICK_SECONDS)
        self._thread = ExitStack()

    def __enter__(self) -> Self:
        self._thread.enter_context(self._news)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.close()

    @contextmanager
    def offered(self, claim: Claim, batch: RowBatch) -> Iterator[None]:
        """While an attempt waits for the rows of `batch`, which the engine has by now, they can be watched."""
        offer = _Offer(claim, batch)
        with self._lock:
            self._offers.append(offer)
        try:
            yield
        finally:
            with self._lock:
                self._offers.remove(offer)
            self._news.put(_Over(offer))

    def look(self) -> None:
        """Begin the streams of rows that somebody has begun to watch. Raises redis' errors."""
        with self._lock:
            offers = list(self._offers)
        if not offers:
            return
        watched = self.watch.watched({offer.claim.job_id for offer in offers})
        for job_id, row in watched:
            for offer in offers:
                if offer.claim.job_id == job_id:
                    self._follow_if_offered(offer, row)

    def _follow_if_offered(self, offer: _Offer, row: int) -> None:
        # Nobody would end the streams of an attempt that has ended since: all would be kept for good.
        with self._lock:
            if any(other is offer for other in self._offers):
                self._follow(offer, row)

    def _follow(self, offer: _Offer, row: int) -> None:
        request = offer.batch.request(row)
        if request is None or request.request_id in offer.samples:
            return
        # The attempt's id, not its number: a row that is tried again is another shard's.
        stream_id, attempt = row_stream_id(offer.claim.job_id, row), offer.claim.attempt_id
        self.publisher.open(stream_id, attempt)
        text = GrowingText.of(self.tokenizer, request)
        sample = LiveSample(stream_id, attempt, request, self.tokenizer, self.publisher, text, [])
        offer.samples[request.request_id] = sample
        tell = partial(self._tell, offer, request.request_id)
        self.host.watch(request.request_id, tell, tell)

    def _tell(self, offer: _Offer, request_id: str, what: RequestEvent | Outcome) -> None:
        """In the engine's thread."""
        self._news.put(_News(offer, request_id, what))

    def _handle_all(self, news: list[_News | _Over]) -> None:
        for each in news:
            if isinstance(each, _Over):
                for sample in each.offer.samples.values():
                    sample.release()
            else:
                self._handle(each.offer.samples[each.request_id], each.what)

    def _handle(self, sample: LiveSample, what: RequestEvent | Outcome) -> None:
        if isinstance(what, RequestEvent):
            sample.add(what)
        elif isinstance(what, Refusal):
            sample.fail(StreamError("row_failed", what.error))
        elif isinstance(what, EngineFailure):
            # It may run when tried again.
            sample.release()
        else:
            sample.end(what)
