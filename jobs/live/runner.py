"""Answers live requests: from the bell to the end of the stream."""

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from redis.exceptions import RedisError

from ...engine.request import RequestEvent
from ...engine.text.tokenizer import Tokenizer
from ..hosting.engine_host import EngineHost
from ..hosting.outcomes import Answer, EngineFailure, Outcome, Refusal
from ..streams.events import StreamError
from ..streams.publisher import StreamPublisher
from .answer import Interruption, LiveAnswer, LiveSample
from .claimer import Claimed, Claimer, internal_error
from .claims import LiveClaim, LiveClaims
from .closer import Closer, Closing
from .in_batches import TICK_SECONDS, InBatches
from .in_flight import AnswersInFlight
from .leases import LiveLeases
from .prompt import length_problem
from .turns import Turns

logger = logging.getLogger(__name__)

MAX_CRASHES = 2
MAX_FAILURES = 3
# How long requests may still run once the worker was told to stop, and how long what they brought may take to be
# written down. Both together are less than what process managers commonly leave a process to end: 10 s.
GRACE_SECONDS = 4.0
HAND_BACK_SECONDS = 3.0


@dataclass(frozen=True)
class _Interrupt:
    answer: LiveAnswer
    why: Interruption


@dataclass(frozen=True)
class _Turn:
    """The engine has room for an answer, and it is its tenant's turn."""

    answer: LiveAnswer


_Item = RequestEvent | Outcome | _Interrupt | _Turn | Claimed


@dataclass
class LiveRunner:
    """A worker's live requests. A context manager: leaving it ends or hands back what is in flight. Thread-safe.

    Three threads share the work: the claimer's, the closer's, and one here that turns the engine's events into texts.
    The engine's own only appends to a queue. `num_slots`: how many samples the engine gets at a time; the rest waits
    for its tenant's turn.
    """

    host: EngineHost
    tokenizer: Tokenizer
    publisher: StreamPublisher
    claims: LiveClaims
    grace_seconds: float = GRACE_SECONDS
    num_slots: int = 256
    _by_engine_id: dict[str, LiveAnswer] = field(default_factory=dict)
    _next_look_at_deadlines: float = 0.0

    def __post_init__(self) -> None:
        self._answers = AnswersInFlight()
        self._events = InBatches[_Item]("live events", self._handle_all)
        self._turns = Turns[LiveAnswer](self.num_slots, lambda answer: self._events.put(_Turn(answer)))
        self._claimer = Claimer(
            self.claims, self.publisher, self.tokenizer, self._answers, self._events.put, self._interrupt_soon
        )
        self._closer = Closer(self.claims, self.publisher, self._forget)
        self._leases = LiveLeases(self.claims, self._answers, self._interrupt_soon)
        self._threads = ExitStack()

    def __enter__(self) -> Self:
        for part in (self._closer, self._events, self._claimer):
            self._threads.enter_context(part)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.drain()
        self._answers.wait_until_empty(self.grace_seconds)
        for answer in self._answers.all():
            self._interrupt_soon(answer, Interruption.HANDED_BACK)
        self._answers.wait_until_empty(HAND_BACK_SECONDS)
        self._threads.close()

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def ring(self, request_id: str) -> None:
        """Have a request claimed and answered. Returns at once."""
        self._claimer.ring(request_id)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is here. Returns at once."""
        self._claimer.call_off(request_id)
        answer = self._answers.get(request_id)
        if answer is not None:
            self._interrupt_soon(answer, Interruption.CANCELLED)

    def drain(self) -> None:
        """Take nothing more; bells that come now are passed on."""
        self._claimer.drain()

    def renew_leases(self) -> None:
        """Keep what is in flight, and find out what is not ours any more. Raises redis' errors."""
        self._leases.renew()

    def sweep(self) -> None:
        """Ring for what dead workers held and for lost bells. Raises redis' errors."""
        self._leases.sweep()

    def _interrupt_soon(self, answer: LiveAnswer, why: Interruption) -> None:
        self._events.put(_Interrupt(answer, why))

    def _forget(self, answer: LiveAnswer) -> None:
        self._turns.leave(answer)
        self._answers.remove(answer)

    # In the thread of events.

    def _handle_all(self, items: list[_Item]) -> None:
        for item in items:
            if isinstance(item, Claimed | _Interrupt | _Turn):
                self._handle(item.answer, item)
            elif (answer := self._by_engine_id.get(item.request_id)) is not None:
                self._handle(answer, item)
        self._look_at_deadlines(time.monotonic())

    def _handle(self, answer: LiveAnswer, item: _Item) -> None:
        try:
            if isinstance(item, Claimed):
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
            self._give_up(answer, internal_error(error))

    def _open(self, claimed: Claimed) -> None:
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
            error = internal_error(failure)
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

    def _problem(self, claim: LiveClaim) -> StreamError | None:
        """Why a request is not to reach the engine, if so."""
        num_tokens, most = len(claim.request.prompt_token_ids), self.host.max_model_len
        if claim.num_crashes >= MAX_CRASHES:
            return StreamError("worker_crashed", f"the worker died {claim.num_crashes} times while it ran this request")
        if num_tokens >= most:
            return StreamError("context_length_exceeded", length_problem(num_tokens, most))
        return _DEADLINE if claim.seconds_left <= 0 else None

    def _look_at_deadlines(self, now: float) -> None:
        if now < self._next_look_at_deadlines:
            return
        self._next_look_at_deadlines = now + TICK_SECONDS
        for answer in self._answers.all():
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
            answer.is_over = True
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
            sample.release()

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
        self._closer.close(Closing(answer, hands_back, has_failed))


_DEADLINE = StreamError("deadline_exceeded", "the request's deadline has passed")
