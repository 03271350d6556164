"""Answers live requests: from the bell to the end of the stream."""

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ...engine.errors import InvalidRequestError
from ...engine.request import RequestEvent
from ...engine.tokenizer import Tokenizer
from ..celery_app import queue_is_empty, send_request
from ..engine_host import Answer, EngineFailure, EngineHost, Outcome, Refusal
from ..streams.events import RecoveredStream, StreamError
from ..streams.publisher import StreamPublisher
from .answer import Interruption, LiveAnswer, LiveSample
from .claims import LiveClaim, LiveClaims, Verdict
from .in_batches import InBatches
from .turns import Turns

logger = logging.getLogger(__name__)

MAX_CRASHES = 2
MAX_FAILURES = 3
# How long requests may still run once the worker was told to stop, and how long what they brought may take to be
# written down. Both together are less than what process managers commonly leave a process to end: 10 s.
GRACE_SECONDS = 4.0
HAND_BACK_SECONDS = 3.0
_TICK_SECONDS = 0.25
_FLUSH_SECONDS = 5.0
# A request whose bell is older than this, while no bell waits to be heard, has lost it.
_LOST_BELL_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_MAX_CLAIMS = 64


@dataclass(frozen=True)
class _Interrupt:
    answer: LiveAnswer
    why: Interruption


@dataclass(frozen=True)
class _Turn:
    """The engine has room for an answer, and it is its tenant's turn."""

    answer: LiveAnswer


@dataclass(frozen=True)
class _Claimed:
    """An answer that may begin after what earlier attempts streamed; None when it is to be handed back.

    `error`: why it can not be begun at all.
    """

    answer: LiveAnswer
    recovered: dict[str, RecoveredStream] | None
    error: StreamError | None = None


_Item = RequestEvent | Outcome | _Interrupt | _Turn | _Claimed


@dataclass(frozen=True)
class _Closing:
    """An answer that is over: ended, or to be handed back once what it has brought is written."""

    answer: LiveAnswer
    hands_back: bool = False
    has_failed: bool = False


@dataclass
class LiveRunner:
    """A worker's live requests. A context manager: leaving it ends or hands back what is in flight. Thread-safe.

    Three threads share the work: one claims, one turns the engine's events into texts, one waits until what has ended
    is written before Redis is told so. The engine's own only appends to a queue. `num_slots`: how many samples the
    engine gets at a time; the rest waits for its tenant's turn.
    """

    host: EngineHost
    tokenizer: Tokenizer
    publisher: StreamPublisher
    claims: LiveClaims
    app: Celery
    grace_seconds: float = GRACE_SECONDS
    num_slots: int = 256
    _answers: dict[str, LiveAnswer] = field(default_factory=dict)
    _by_engine_id: dict[str, LiveAnswer] = field(default_factory=dict)
    _to_close: list[_Closing] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _draining: threading.Event = field(default_factory=threading.Event)
    _no_sweep_before: float = 0.0
    _next_look_at_deadlines: float = 0.0

    def __post_init__(self) -> None:
        self._bells = InBatches[str]("live claims", self._claim_all, _TICK_SECONDS)
        self._events = InBatches[_Item]("live events", self._handle_all, _TICK_SECONDS)
        self._turns = Turns[LiveAnswer](self.num_slots, lambda answer: self._events.put(_Turn(answer)))
        self._closings = InBatches[_Closing]("live ends", self._close_all, _TICK_SECONDS)
        self._threads = ExitStack()

    def __enter__(self) -> Self:
        for thread in (self._closings, self._events, self._bells):
            self._threads.enter_context(thread)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.drain()
        self._wait_for_answers(self.grace_seconds)
        for answer in self._in_flight():
            self._events.put(_Interrupt(answer, Interruption.HANDED_BACK))
        self._wait_for_answers(HAND_BACK_SECONDS)
        self._threads.close()

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def ring(self, request_id: str) -> None:
        """Have a request claimed and answered. Returns at once."""
        self._bells.put(request_id)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is here. Returns at once."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self._events.put(_Interrupt(answer, Interruption.CANCELLED))

    def drain(self) -> None:
        """Take nothing more; bells that come now are passed on."""
        self._draining.set()

    def renew_leases(self) -> None:
        """Keep what is in flight, and find out what is not ours any more. Raises redis' errors."""
        answers = self._in_flight()
        waiting = [answer for answer in answers if not answer.has_begun]
        for answer in waiting:
            answer.is_known_to_wait = True
        try:
            verdicts = self.claims.renew([answer.claim for answer in answers], {answer.id for answer in waiting})
            for answer in waiting:
                # Begun in the meantime.
                if answer.has_begun:
                    self.claims.begin(answer.claim)
        except RedisError:
            self._wait_for_the_others()
            raise
        for answer, verdict in zip(answers, verdicts, strict=True):
            if verdict is Verdict.GONE and not answer.is_over:
                self.claims.restore(answer.claim)
            elif verdict is Verdict.LOST:
                answer.is_lost = True
                self._events.put(_Interrupt(answer, Interruption.LOST))
            elif verdict is Verdict.CANCELLED:
                self._events.put(_Interrupt(answer, Interruption.CANCELLED))

    def sweep(self) -> None:
        """Ring for what dead workers held and for lost bells. Raises redis' errors, kombu's `OperationalError`."""
        if time.monotonic() < self._no_sweep_before:
            return
        try:
            bells_wait = not queue_is_empty(self.app, self.claims.queue)
            for request_id in self.claims.sweep(_LOST_BELL_SECONDS, bells_wait):
                logger.warning("request %s has no worker, ringing for it", request_id)
                send_request(self.app, self.claims.queue, request_id)
        except (RedisError, OperationalError):
            self._wait_for_the_others()
            raise

    def _wait_for_the_others(self) -> None:
        """After an outage of Redis every worker is to have the time to renew, before any of them is taken for dead."""
        self._no_sweep_before = time.monotonic() + self.claims.lease_seconds

    def _in_flight(self) -> list[LiveAnswer]:
        return list(self._answers.values())

    def _wait_for_answers(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._answers, seconds)

    # In the thread that claims.

    def _claim_all(self, request_ids: list[str]) -> None:
        for start in range(0, len(request_ids), _MAX_CLAIMS):
            some = request_ids[start : start + _MAX_CLAIMS]
            try:
                self._claim(some)
            except (RedisError, OperationalError) as error:
                logger.warning("%d requests wait for a sweeper, Redis does not answer: %s", len(some), error)
            # The batch's boundary: the others' bells are not heard again before a sweeper rings.
            except Exception:
                logger.exception("requests cannot be begun: %s", ", ".join(some))

    def _claim(self, request_ids: list[str]) -> None:
        if self._draining.is_set():
            for request_id in request_ids:
                send_request(self.app, self.claims.queue, request_id)
            return
        now = time.monotonic()
        answers = [LiveAnswer(claim, now + claim.seconds_left) for claim in self.claims.claim_all(request_ids)]
        # All before the first is begun, which may take a while: their leases are to be renewed.
        with self._changed:
            self._answers.update((answer.id, answer) for answer in answers)
        for answer in answers:
            self._begin(answer)

    def _begin(self, answer: LiveAnswer) -> None:
        try:
            recovered = self._recover(answer)
            # Compiled here, and kept by the tokenizer: it may take a second, in which no other answer's text grows.
            self.tokenizer.grammar(answer.claim.request.sampling.structure)
        except InvalidRequestError as error:
            self._events.put(_Claimed(answer, {}, StreamError("invalid_request", str(error))))
        # One request's boundary. It is ours by now, so it has to have its end from us.
        except Exception as error:
            logger.exception("request %s cannot be begun", answer.id)
            self._events.put(_Claimed(answer, {}, _internal(error)))
        else:
            self._events.put(_Claimed(answer, recovered))

    def _recover(self, answer: LiveAnswer) -> dict[str, RecoveredStream] | None:
        """What earlier attempts have streamed; None when the request is not ours any more, or the worker stops."""
        if answer.claim.attempt == 1:
            return {}
        streams = answer.claim.request.stream_ids
        while not answer.is_lost and not self._draining.is_set():
            try:
                found = self.publisher.recover(dict.fromkeys(streams, answer.claim.attempt))
            except RedisError as error:
                logger.warning("request %s waits for its earlier tokens: %s", answer.id, error)
                self._draining.wait(_RETRY_SECONDS)
            else:
                return found if len(found) == len(streams) else None
        return None

    def _problem(self, claim: LiveClaim) -> StreamError | None:
        """Why a request is not to reach the engine, if so."""
        num_tokens, most = len(claim.request.prompt_token_ids), self.host.max_model_len
        if claim.num_crashes >= MAX_CRASHES:
            return StreamError("worker_crashed", f"the worker died {claim.num_crashes} times while it ran this request")
        if num_tokens >= most:
            message = f"prompt has {num_tokens} tokens; with one to generate at most {most} fit: shorten it"
            return StreamError("context_length_exceeded", message)
        return _DEADLINE if claim.seconds_left <= 0 else None

    # In the thread of events.

    def _handle_all(self, items: list[_Item]) -> None:
        for item in items:
            if isinstance(item, _Claimed | _Interrupt | _Turn):
                self._handle(item.answer, item)
            elif (answer := self._by_engine_id.get(item.request_id)) is not None:
                self._handle(answer, item)
        self._look_at_deadlines(time.monotonic())

    def _handle(self, answer: LiveAnswer, item: _Item) -> None:
        try:
            if isinstance(item, _Claimed):
                self._open(item)
            elif isinstance(item, _Interrupt):
                self._interrupt(answer, item.why)
            elif isinstance(item, _Turn):
                self._start(answer)
            else:
                self._hear(answer, item)
        # One answer's boundary: what goes wrong with it must not keep the others waiting.
        except Exception as error:
            logger.exception("request %s cannot be answered", answer.id)
            self._give_up(answer, _internal(error))

    def _open(self, claimed: _Claimed) -> None:
        answer, recovered = claimed.answer, claimed.recovered
        answer.is_open = True
        if recovered is None:
            self._hand_back(answer)
            return
        error = claimed.error
        try:
            if error is None:
                answer.open(self.tokenizer, self.publisher, recovered)
        # One request's boundary, as below; nothing of it is in the engine yet.
        except Exception as failure:
            logger.exception("request %s cannot be begun", answer.id)
            error = _internal(failure)
        if error is not None:
            answer.refuse(self.publisher, recovered, error)
            self._close(answer)
            return
        self._by_engine_id.update(dict.fromkeys(answer.samples, answer))
        problem = self._problem(answer.claim)
        if answer.interrupted is not None:
            self._interrupt(answer, answer.interrupted)
        elif answer.claim.is_cancelled:
            self._abort(answer)
        elif problem is not None:
            self._give_up(answer, problem)
        elif not answer.samples:
            self._close(answer)
        else:
            self._turns.enter(answer, answer.claim.request)

    def _look_at_deadlines(self, now: float) -> None:
        if now < self._next_look_at_deadlines:
            return
        self._next_look_at_deadlines = now + _TICK_SECONDS
        for answer in self._in_flight():
            if answer.deadline < now:
                self._interrupt(answer, Interruption.DEADLINE)

    def _start(self, answer: LiveAnswer) -> None:
        # It has none when it was interrupted meanwhile.
        if answer.samples:
            self._note_begun(answer)
            self.host.submit(answer.requests, self._events.put, self._events.put)

    def _note_begun(self, answer: LiveAnswer) -> None:
        """Before the engine has it: what kills the worker then is to count as a crash."""
        answer.has_begun = True
        if answer.is_known_to_wait:
            try:
                self.claims.begin(answer.claim)
            except RedisError as error:
                logger.warning("request %s begins, Redis does not answer: %s", answer.id, error)

    def _hear(self, answer: LiveAnswer, item: RequestEvent | Outcome) -> None:
        sample = answer.samples[item.request_id]
        if isinstance(item, RequestEvent):
            sample.add(item)
        elif isinstance(item, EngineFailure):
            self._retry(answer, item)
        else:
            self._end(answer, sample, item)

    def _end(self, answer: LiveAnswer, sample: LiveSample, outcome: Answer | Refusal) -> None:
        if isinstance(outcome, Refusal):
            code = "generation_failed" if outcome.has_run else "invalid_request"
            sample.fail(StreamError(code, outcome.error))
        else:
            sample.end(outcome)
        del answer.samples[outcome.request_id], self._by_engine_id[outcome.request_id]
        if not answer.samples:
            self._close(answer)

    def _retry(self, answer: LiveAnswer, failure: EngineFailure) -> None:
        if answer.claim.num_failures + 1 >= MAX_FAILURES:
            self._give_up(answer, StreamError("engine_failed", failure.error))
        else:
            self._hand_back(answer, has_failed=True)

    def _interrupt(self, answer: LiveAnswer, why: Interruption) -> None:
        if answer.is_over:
            return
        if not answer.is_open:
            # Its streams are about to be: they are to have their ends too.
            answer.interrupted = why
            return
        if why is Interruption.DEADLINE:
            self._give_up(answer, _DEADLINE)
        elif why is Interruption.HANDED_BACK:
            self._hand_back(answer)
        elif why is Interruption.CANCELLED:
            self._abort(answer)
        else:
            logger.warning("request %s was taken over by another attempt", answer.id)
            self._release_streams(answer)
            self._forget(answer)

    def _abort(self, answer: LiveAnswer) -> None:
        for sample in self._drop(answer):
            sample.abort()
        self._close(answer)

    def _give_up(self, answer: LiveAnswer, error: StreamError) -> None:
        for sample in self._drop(answer):
            sample.fail(error)
        self._close(answer)

    def _hand_back(self, answer: LiveAnswer, has_failed: bool = False) -> None:
        self._release_streams(answer)
        self._close(answer, hands_back=True, has_failed=has_failed)

    def _release_streams(self, answer: LiveAnswer) -> None:
        for sample in self._drop(answer):
            self.publisher.release(sample.stream_id)

    def _drop(self, answer: LiveAnswer) -> list[LiveSample]:
        """Free the KV blocks of the samples that have not ended; what still comes of them is ignored."""
        self.host.abort(answer.samples)
        for engine_id in answer.samples:
            self._by_engine_id.pop(engine_id, None)
        dropped = list(answer.samples.values())
        answer.samples.clear()
        return dropped

    def _close(self, answer: LiveAnswer, hands_back: bool = False, has_failed: bool = False) -> None:
        answer.is_over = True
        self._turns.leave(answer)
        self._closings.put(_Closing(answer, hands_back, has_failed))

    # In the thread of ends.

    def _close_all(self, closings: list[_Closing]) -> None:
        self._to_close += closings
        # Whoever learns that a request has ended must find its whole stream.
        if not self._to_close or not self.publisher.flush(_FLUSH_SECONDS, hurry=False):
            return
        ended = [closing.answer for closing in self._to_close if not closing.hands_back]
        try:
            self.claims.end([answer.claim for answer in ended])
            for answer in ended:
                self._forget(answer)
            self._to_close = [closing for closing in self._to_close if closing.hands_back]
            while self._to_close:
                self._give_back(self._to_close[0])
                self._to_close.pop(0)
        except (RedisError, OperationalError) as error:
            logger.warning("%d requests wait to be closed: %s", len(self._to_close), error)

    def _give_back(self, closing: _Closing) -> None:
        answer = closing.answer
        is_ours = self.claims.release(answer.claim, closing.has_failed)
        # Before the bell, which may be answered here.
        self._forget(answer)
        if is_ours:
            send_request(self.app, self.claims.queue, answer.id)

    def _forget(self, answer: LiveAnswer) -> None:
        self._turns.leave(answer)
        with self._changed:
            if self._answers.get(answer.id) is answer:
                del self._answers[answer.id]
            self._changed.notify_all()


def _internal(error: Exception) -> StreamError:
    return StreamError("internal_error", f"{type(error).__name__}: {error}")


_DEADLINE = StreamError("deadline_exceeded", "the request's deadline has passed")
