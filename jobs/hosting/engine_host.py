"""The engine's thread: requests from many threads in, answers out, one engine stepping in between."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

from ...engine.engine import Engine, EngineStats
from ...engine.errors import InvalidRequestError, one_line
from ...engine.logprobs import TokenLogprobs
from ...engine.request import Request, RequestEvent
from .outcomes import Answer, EngineFailure, Outcome, Refusal

logger = logging.getLogger(__name__)

# Kernels are compiled when they are first used: for prompts, for decodes, for both in one step.
_WARM_STEPS = 8
_STEP = "at"

NO_LOGPROBS: Mapping[str, Sequence[TokenLogprobs]] = MappingProxyType({})

# Called in the engine's thread: it must be quick and must not raise.
Sink = Callable[[Outcome], None]
# Likewise: with all that one step has brought for the requests of one call. A thread that waits is woken once.
BatchSink = Callable[[list[Outcome]], None]
# Likewise: called with every event that brings tokens, the last one included, before the outcome.
TokenSink = Callable[[RequestEvent], None]


@dataclass(slots=True)
class _Pending:
    sink: BatchSink
    on_tokens: TokenSink | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class EngineHost:
    """Owns an engine and the only thread that touches it. A context manager; leaving it drops what is pending."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: dict[str, _Pending] = {}
        # What is still to be told, by whom it concerns.
        self._untold: dict[BatchSink, list[Outcome]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        # What the thread has done so far, and what it is at: None where it waits to be told.
        self._num_done = 0
        self._at: str | None = None
        self._cpu_clock: int | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def place(self) -> tuple[int, int] | None:
        """Another one whenever the thread has got on; None while it has nothing to do. For any thread."""
        return None if self._at is None else (self._num_done, self._engine.num_launched_steps)

    @property
    def is_warm(self) -> bool:
        """Whether its steps have done by now what the first ones have to do beside computing."""
        return self._engine.stats.num_steps >= _WARM_STEPS

    @property
    def cpu_seconds(self) -> float:
        """How long the thread has computed, beside a CPU; 0 beside a GPU, which it may wait for in a loop."""
        if self._cpu_clock is None or self._engine.device.type != "cpu":
            return 0.0
        try:
            return time.clock_gettime(self._cpu_clock)
        # It has ended this moment.
        except OSError:
            return 0.0

    def words(self) -> str:
        """What the thread is at, for messages."""
        stats = self._engine.stats
        number = stats.num_steps + (self._at == _STEP)
        sequences = f"{stats.num_running:,} sequences running and {stats.num_waiting:,} waiting"
        return f"the engine, {self._at} step {number:,} with {sequences},"

    def show_others(self) -> None:
        """Have the processes that share the model write what they are at to standard error."""
        self._engine.show_others()

    @property
    def max_model_len(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._engine.max_model_len

    def submit(
        self,
        requests: Sequence[Request],
        sink: Sink,
        on_tokens: TokenSink | None = None,
        resume_logprobs: Mapping[str, Sequence[TokenLogprobs]] = NO_LOGPROBS,
    ) -> None:
        """Hand requests over; `sink` gets one outcome for each, unless it is aborted. Returns at once.

        `on_tokens` is told of their tokens as they come. `resume_logprobs`: those of the tokens that requests are
        resumed from, by their ids; their answers begin with these.
        What all their prompts begin with stays in the prefix cache until the last of them has begun, as far as it can.
        """
        self._submit(requests, _one_by_one(sink), on_tokens, resume_logprobs)

    def submit_rows(
        self,
        requests: Sequence[Request],
        sink: BatchSink,
        resume_logprobs: Mapping[str, Sequence[TokenLogprobs]] = NO_LOGPROBS,
    ) -> None:
        """As `submit`, for requests whose outcomes are taken together and whose tokens nobody watches."""
        self._submit(requests, sink, None, resume_logprobs)

    def _submit(
        self,
        requests: Sequence[Request],
        sink: BatchSink,
        on_tokens: TokenSink | None,
        resume_logprobs: Mapping[str, Sequence[TokenLogprobs]],
    ) -> None:
        prefix = _common_prefix([request.prompt_token_ids for request in requests])
        self._command(lambda: self._add(requests, sink, on_tokens, prefix, resume_logprobs))

    def watch(self, request_id: str, sink: Sink, on_tokens: TokenSink) -> None:
        """Tell another of a request's tokens, those it has by now first, and of its outcome. Returns at once.

        Does nothing when it has ended.
        """
        self._command(lambda: self._watch(request_id, sink, on_tokens))

    def tokens_after(
        self, request_id: str, number: int, at_least: int, with_logprobs: bool = False
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """Those that an answer in flight has after so many; none unless they are `at_least` as many."""
        pending = self._pending.get(request_id)
        if pending is None:
            return [], []
        # In this order: what the engine tells meanwhile is missing then, and not there twice. It only ever appends,
        # log-probabilities after their tokens.
        known_logprobs, known = pending.logprobs[:], pending.token_ids[:]
        untold, untold_logprobs = self._engine.untold(request_id)
        token_ids, logprobs = [*known, *untold][number:], [*known_logprobs, *untold_logprobs][number:]
        if len(token_ids) < at_least:
            return [], []
        return (token_ids[: len(logprobs)], logprobs) if with_logprobs else (token_ids, [])

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests and free their KV blocks; those that have ended already are left alone. Returns at once."""
        ids = list(request_ids)
        self._command(lambda: self._abort(ids))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        if sys.platform == "linux":
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        while self._wait():
            while self._commands:
                self._begin("taking requests after")
                self._commands.popleft()()
            self._begin("telling of answers of")
            self._tell_all()
            if self._engine.has_work:
                self._begin(_STEP)
                self._step()
                self._begin("telling of answers of")
                self._tell_all()

    def _begin(self, what: str) -> None:
        self._num_done += 1
        self._at = what

    def _wait(self) -> bool:
        """Until there is something to do; false when it is time to stop."""
        self._at = None
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or self._engine.has_work)
            return not self._stopping

    def _add(
        self,
        requests: Sequence[Request],
        sink: BatchSink,
        on_tokens: TokenSink | None,
        prefix: Sequence[int],
        resume_logprobs: Mapping[str, Sequence[TokenLogprobs]],
    ) -> None:
        num_added = 0
        for request in requests:
            self._num_done += 1
            try:
                self._engine.add(request)
            except InvalidRequestError as error:
                self._note(sink, Refusal(request.request_id, str(error), has_run=False))
            # Nothing else is expected of `add`; were it to happen, its caller must hear of it and the thread live.
            except Exception as error:
                logger.exception("the engine did not take request %s", request.request_id)
                self._note(sink, EngineFailure(request.request_id, one_line(error)))
            else:
                logprobs = resume_logprobs.get(request.request_id, ())
                pending = _Pending(sink, on_tokens, list(request.resume_token_ids), list(logprobs))
                self._pending[request.request_id] = pending
                num_added += 1
        # One alone shares with nobody.
        if num_added > 1:
            self._engine.expect_prefix(prefix, num_added, requests[0].lora_request, requests[0].cache_salt)

    def _watch(self, request_id: str, sink: Sink, on_tokens: TokenSink) -> None:
        pending = self._pending.get(request_id)
        if pending is None:
            return
        if (untold := self._engine.watch(request_id)) is not None:
            self._deliver(untold)
        if pending.token_ids:
            on_tokens(
                RequestEvent(
                    request_id,
                    tuple(pending.token_ids),
                    logprobs=tuple(pending.logprobs),
                    prompt_logprobs=pending.prompt_logprobs,
                )
            )
        pending.sink, pending.on_tokens = _both(_one_by_one(sink), pending.sink), on_tokens

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._pending.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _step(self) -> None:
        num_tokens = self._engine.num_generated_tokens
        try:
            events = self._engine.step()
        # The boundary between the engine and its users: whatever a model raises, they hear of it and the thread lives.
        except Exception as error:
            logger.exception("the engine's step failed")
            self._fail_all(one_line(error))
            return
        # Beside rows that got through an error is the row's own. Where none did, another attempt may do better.
        is_stuck = self._engine.num_generated_tokens == num_tokens and all(event.error is not None for event in events)
        kind = EngineFailure if is_stuck else Refusal
        for event in events:
            if event.error is None:
                self._deliver(event)
                continue
            sink = self._pending.pop(event.request_id).sink
            if event.is_invalid:
                self._note(sink, Refusal(event.request_id, event.error, has_run=False))
            else:
                self._note(sink, kind(event.request_id, event.error))

    def _deliver(self, event: RequestEvent) -> None:
        pending = self._pending[event.request_id]
        pending.token_ids += event.new_token_ids
        if event.logprobs:
            pending.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            pending.prompt_logprobs = event.prompt_logprobs
        if pending.on_tokens is not None and event.new_token_ids:
            pending.on_tokens(event)
        if event.finish_reason is None:
            return
        del self._pending[event.request_id]
        answer = Answer(
            event.request_id,
            tuple(pending.token_ids),
            event.finish_reason,
            event.num_cached_tokens,
            event.choice_index,
            event.choice_probabilities,
            tuple(pending.logprobs),
            pending.prompt_logprobs,
        )
        self._note(pending.sink, answer)

    def _note(self, sink: BatchSink, outcome: Outcome) -> None:
        if (outcomes := self._untold.get(sink)) is None:
            outcomes = self._untold[sink] = []
        outcomes.append(outcome)

    def _tell_all(self) -> None:
        untold, self._untold = self._untold, {}
        for sink, outcomes in untold.items():
            sink(outcomes)

    def _fail_all(self, error: str) -> None:
        for request_id in list(self._pending):
            self._engine.abort(request_id)
            self._note(self._pending.pop(request_id).sink, EngineFailure(request_id, error))


def _one_by_one(sink: Sink) -> BatchSink:
    def tell(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            sink(outcome)

    return tell


def _both(first: BatchSink, second: BatchSink) -> BatchSink:
    def tell(outcomes: list[Outcome]) -> None:
        first(outcomes)
        second(outcomes)

    return tell


def _common_prefix(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """What all prompts begin with."""
    prefix: Sequence[int] = prompts[0] if prompts else ()
    for prompt in prompts:
        # Nearly always, once some have been looked at.
        if prompt[: len(prefix)] == prefix:
            continue
        pairs = enumerate(zip(prefix, prompt, strict=False))
        num_common = next((place for place, (one, other) in pairs if one != other), min(len(prefix), len(prompt)))
        prefix = prefix[:num_common]
    return prefix
