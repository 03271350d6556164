"""The thread that claims the requests that bells are rung for, and finds out where earlier attempts at them stand."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from redis.exceptions import RedisError

from ...engine.errors import InvalidRequestError
from ...engine.text.tokenizer import Tokenizer
from ..streams.events import RecoveredStream, StreamError
from ..streams.publisher import StreamPublisher
from .answer import Interruption, LiveAnswer
from .claims import LiveClaims
from .in_batches import InBatches
from .in_flight import AnswersInFlight

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.2
_MAX_CLAIMS = 64


@dataclass(frozen=True)
class Claimed:
    """An answer that may begin after what earlier attempts streamed; None when it is to be handed back.

    `error`: why it can not be begun at all.
    """

    answer: LiveAnswer
    recovered: dict[str, RecoveredStream] | None
    error: StreamError | None = None


class Claimer:
    """A context manager; `ring` and `drain` are thread-safe. `on_claimed` is told of each request in its thread.

    `interrupt` is told before that which answers of before it takes the place of.
    """

    def __init__(
        self,
        claims: LiveClaims,
        publisher: StreamPublisher,
        tokenizer: Tokenizer,
        in_flight: AnswersInFlight,
        on_claimed: Callable[[Claimed], None],
        interrupt: Callable[[LiveAnswer, Interruption], None],
    ) -> None:
        self._claims = claims
        self._publisher = publisher
        self._tokenizer = tokenizer
        self._in_flight = in_flight
        self._on_claimed = on_claimed
        self._interrupt = interrupt
        self._draining = threading.Event()
        # What is being claimed, and which of it was called off before anybody could be told.
        self._claiming: set[str] = set()
        self._called_off: set[str] = set()
        self._lock = threading.Lock()
        self._bells = InBatches[str]("live claims", self._claim_all)

    def __enter__(self) -> Self:
        self._bells.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bells.__exit__(*exc_info)

    def ring(self, request_id: str) -> None:
        """Have a request claimed. Returns at once."""
        self._bells.put(request_id)

    def call_off(self, request_id: str) -> None:
        """Have a request that is being claimed end as soon as it is; otherwise it is in flight by now, or not here."""
        with self._lock:
            if request_id in self._claiming:
                self._called_off.add(request_id)

    def drain(self) -> None:
        """Take nothing more; bells that come now are passed on."""
        self._draining.set()

    def _claim_all(self, request_ids: list[str]) -> None:
        for start in range(0, len(request_ids), _MAX_CLAIMS):
            some = request_ids[start : start + _MAX_CLAIMS]
            try:
                self._claim(some)
            except RedisError as error:
                logger.warning("%d requests wait for a sweeper, Redis does not answer: %s", len(some), error)
            # The batch's boundary: the others' bells are not heard again before a sweeper rings.
            except Exception:
                logger.exception("requests cannot be begun: %s", ", ".join(some))

    def _claim(self, request_ids: list[str]) -> None:
        if self._draining.is_set():
            self._claims.ring(request_ids)
            return
        with self._being_claimed(request_ids) as called_off:
            now = time.monotonic()
            answers = [LiveAnswer(claim, now + claim.seconds_left) for claim in self._claims.claim_all(request_ids)]
            # All before the first is begun, which may take a while: their leases are to be renewed.
            earlier = self._in_flight.add(answers)
        # This worker was starved for longer than their leases.
        for answer in earlier:
            answer.is_lost = True
            self._interrupt(answer, Interruption.LOST)
        for answer in answers:
            if answer.id in called_off:
                answer.interrupted = Interruption.CANCELLED
            self._begin(answer)

    @contextmanager
    def _being_claimed(self, request_ids: list[str]) -> Iterator[set[str]]:
        """Yields which of them are called off meanwhile, for afterwards: from then on they are found in flight."""
        called_off: set[str] = set()
        with self._lock:
            self._claiming, self._called_off = set(request_ids), called_off
        try:
            yield called_off
        finally:
            with self._lock:
                self._claiming, self._called_off = set(), set()

    def _begin(self, answer: LiveAnswer) -> None:
        try:
            recovered = self._recover(answer)
            # Compiled here, and kept by the tokenizer: it may take a second, in which no other answer's text grows.
            self._tokenizer.grammar(answer.claim.request.sampling.structure)
        except InvalidRequestError as error:
            self._on_claimed(Claimed(answer, {}, StreamError("invalid_request", str(error))))
        # One request's boundary. It is ours by now, so it has to have its end from us.
        except Exception as error:
            logger.exception("request %s cannot be begun", answer.id)
            self._on_claimed(Claimed(answer, {}, internal_error(error)))
        else:
            self._on_claimed(Claimed(answer, recovered))

    def _recover(self, answer: LiveAnswer) -> dict[str, RecoveredStream] | None:
        """What earlier attempts have streamed; None when the request is not ours any more, or the worker stops."""
        if answer.claim.attempt == 1:
            return {}
        streams = answer.claim.request.stream_ids
        while not answer.is_lost and not self._draining.is_set():
            try:
                found = self._publisher.recover(dict.fromkeys(streams, answer.claim.attempt))
            except RedisError as error:
                logger.warning("request %s waits for its earlier tokens: %s", answer.id, error)
                self._draining.wait(_RETRY_SECONDS)
            else:
                return found if len(found) == len(streams) else None
        return None


def internal_error(error: Exception) -> StreamError:
    """What a request's reader is told of a fault of ours."""
    return StreamError("internal_error", f"{type(error).__name__}: {error}")
