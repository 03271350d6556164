"""Requests in, tokens out: synchronous, deterministic, without I/O."""

import logging
from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from traceback import clear_frames

from .admission import Admission, resolve_max_model_len
from .batch import Batch, SampledTokens
from .block_pool import BlockPool
from .block_tables import BlockTables
from .config import EngineConfig
from .decode_rows import DecodeRows
from .errors import InvalidRequestError
from .in_flight import StepInFlight
from .live_request import LiveRequest
from .logprobs import TokenLogprobs
from .model_config import ModelConfig
from .model_runner import ModelRunner
from .out_of_memory import is_out_of_memory, release_cached_memory
from .prefix_cache import PrefixCache, hash_blocks
from .request import FinishReason, Request, RequestEvent
from .runner import Runner
from .sampling_batch import SampledRow, SamplingBatch
from .scheduler import Scheduler
from .sequence import Sequence
from .step_plan import StepPlan
from .step_result import LaunchedResult, StepResult
from .swap import SwapSpace

logger = logging.getLogger(__name__)

_NOT_FINITE = "the model's logits are not finite (NaN or infinity): its weights or dtype do not bear this prompt"


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine started, and of what it holds now."""

    num_waiting: int
    num_running: int
    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    num_swaps: int
    num_blocks: int
    # Free, or cached by nobody's need.
    num_available_blocks: int


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_position_embeddings: int,
        eos_token_ids: SequenceOf[int] = (),
    ) -> None:
        self._runner = runner
        self._config = config
        self.max_model_len = resolve_max_model_len(
            config, runner.memory.num_blocks, runner.sliding_window, max_position_embeddings
        )
        self._admission = Admission(
            self.max_model_len, runner.vocab_size, tuple(eos_token_ids), config.block_size, config.seed
        )
        self._cache = PrefixCache(BlockPool(runner.memory.num_blocks), config.enable_prefix_caching)
        self._tables = BlockTables(self._cache, runner.sliding_window, _swap_space(runner, config))
        self._scheduler = Scheduler(self._tables, config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[str, LiveRequest] = {}
        self._arrivals = count()
        # Requests whose answer needs no computation; they end at the next step.
        self._decided: list[LiveRequest] = []
        self._num_guided = 0
        self._is_async = _is_async(runner, config)
        # What the last step sampled, while the sequences that decode stay the same.
        self._last_sampled: LaunchedResult | None = None
        # The step that was launched before the last one was read.
        self._in_flight: StepInFlight | None = None
        self._num_steps = 0
        self._num_computed_tokens = 0

    @classmethod
    def from_pretrained(cls, model: str | Path, config: EngineConfig | None = None) -> "Engine":
        """Load a Hugging Face model folder. Raises `ModelError` or `ConfigError`."""
        config = config or EngineConfig()
        model_config = ModelConfig.from_pretrained(model)
        runner = ModelRunner(model_config, config)
        return cls(runner, config, model_config.max_position_embeddings, model_config.eos_token_ids)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_swaps=self._tables.num_swaps,
            num_blocks=self._cache.num_blocks,
            num_available_blocks=self._cache.num_available,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` when it could never run; nothing changes then."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        live = self._admission.accept(request, next(self._arrivals))
        leader = self._leader_of(live)
        self._requests[request.request_id] = live
        self._num_guided += live.guide is not None
        if live.is_decided:
            self._decided.append(live)
            return
        sequence = live.new_sequence(live.tree.nodes[0] if live.tree else None)
        if leader is not None:
            live.leader = leader
            leader.followers.append(live)
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its KV blocks; false when it is not here (any more)."""
        live = self._requests.get(request_id)
        if live is None:
            return False
        self._decided = [other for other in self._decided if other is not live]
        self._drop(live)
        return True

    def expect_prefix(self, token_ids: SequenceOf[int], num_requests: int) -> None:
        """Announce requests whose prompts begin with these tokens: until they have come, its blocks are evicted last.

        For a caller who knows more than the queue: rows not added yet, or which of the waiting ones share what. A
        request counts as come when it is first admitted, or ends before that. A negative number takes back.
        """
        self._scheduler.expected.expect(hash_blocks(token_ids, self._config.block_size), num_requests)

    def step(self) -> list[RequestEvent]:
        """Compute one batch and return what it brought, at most one event a request.

        With `async_scheduling` the next batch is launched before this one is read, wherever it does not depend on
        what is read; what was computed for a request that has ended meanwhile is thrown away.

        Where the model or the sampling raises, the step is undone and its requests are tried apart: those that fail
        alone end with `FinishReason.ERROR`, the others go on. When the device is out of memory the step is tried with
        fewer tokens first. What is no `Exception` (KeyboardInterrupt) goes to the caller, the step undone.
        """
        self._zero_tainted_blocks()
        events = self._step()
        decided, self._decided = self._decided, []
        return [self._end(live, live.decide()) for live in decided] + events

    def check(self) -> None:
        """Assert that every KV block is accounted for. For tests."""
        self._scheduler.check()

    def _step(self, among: Container[str] | None = None) -> list[RequestEvent]:
        """Read one step, of the requests named or of all, and whatever it takes to get past an error.

        It may have been launched before; where it can, the next one is launched first.
        """
        step = self._in_flight
        if step is None:
            plan = self._scheduler.schedule(among)
            if not plan.scheduled and not plan.swapped_out:
                return []
            try:
                step = self._launch(plan, self._is_async and among is None)
            except BaseException as error:
                self._scheduler.undo(plan)
                if not isinstance(error, Exception):
                    raise
                return self._recover(plan, error, among)
        # Should anything but an error interrupt what follows, it is read next time.
        self._in_flight = step
        following = self._look_ahead(step)
        try:
            result = step.read()
        except BaseException as error:
            self._last_sampled = None
            if following is not None:
                self._scheduler.take_back(following.plan, following.unread)
            if not isinstance(error, Exception):
                raise
            self._in_flight = None
            self._scheduler.take_back(step.plan, step.unread)
            return self._recover(step.plan, error, among)
        self._in_flight = following
        return self._record(step.plan, result)

    def _look_ahead(self, step: StepInFlight) -> StepInFlight | None:
        """Launch the step after one that is not read yet; None, and nothing changed, where that is not to be.

        Whatever is out of the ordinary, preemption or an error, is left to the step's proper time, when all is known.
        """
        if step.sampled is None:
            return None
        plan = self._scheduler.schedule(is_ahead=True)
        if plan.is_stuck or not plan.scheduled:
            self._scheduler.undo(plan)
            return None
        try:
            return self._launch(plan, True, step.sampled)
        except BaseException as error:
            self._scheduler.undo(plan)
            if not isinstance(error, Exception):
                raise
            clear_frames(error.__traceback__)
            logger.debug("a step ahead failed, it is tried again in its turn: %s", error)
            return None

    def _recover(self, plan: StepPlan, error: Exception, among: Container[str] | None) -> list[RequestEvent]:
        # The failed step's tensors hang on its frames: they are not to be in the way of the next try.
        clear_frames(error.__traceback__)
        if is_out_of_memory(error) and self._scheduler.budget.shrink(plan.num_tokens):
            release_cached_memory(self._runner.device)
            logger.warning("out of memory with %d tokens in a step, trying half: %s", plan.num_tokens, error)
            return self._step(among)
        tried = {item.sequence.request_id: item.sequence for item in plan.scheduled}
        # Some may have ended while the step was in flight.
        suspects = [request_id for request_id, sequence in tried.items() if self._is_served(sequence)]
        if len(tried) == 1 and suspects:
            logger.error("request %s fails", suspects[0], exc_info=error)
            return [self._fail(self._requests[suspects[0]], _one_line(error))]
        logger.warning("a step of %d requests failed, trying them apart: %s", len(tried), error)
        half = len(suspects) // 2
        return [event for part in (suspects[:half], suspects[half:]) if part for event in self._step(frozenset(part))]

    def _is_served(self, sequence: Sequence) -> bool:
        live = self._requests.get(sequence.request_id)
        return live is not None and live.arrival == sequence.arrival

    def _launch(self, plan: StepPlan, may_be_followed: bool, sampled: SampledTokens | None = None) -> StepInFlight:
        """Begin to compute a step; `sampled` is what the step before it samples, where that is not read yet."""
        for sequence, blocks in plan.swapped_out:
            if sequence.swapped is not None:
                sequence.swapped.content = self._runner.memory.swap_out(blocks)
        for swap_in in plan.swapped_in:
            self._runner.memory.swap_in(swap_in.swapped.content, swap_in.first, swap_in.blocks)
        if not plan.scheduled:
            return StepInFlight(plan, None)
        # Until this one is launched there is no last one.
        last, self._last_sampled = self._last_sampled, None
        if plan.decodes is not None and last is not None and last.batch.ended is plan.decodes.sequences:
            logits = self._runner.execute(Batch.of_decodes(plan.decodes, last.tokens, self._runner.device))
            last.batch.advance()
            result = LaunchedResult.of(logits, last.batch)
        else:
            logits = self._runner.execute(
                Batch.build(plan.scheduled, self._config.block_size, self._runner.device, sampled)
            )
            result = LaunchedResult.of(logits, self._sampling_of(plan))
        step = StepInFlight.of(plan, result, may_be_followed)
        self._scheduler.launched(plan, step.unread)
        self._last_sampled = result if result.batch.is_plain else None
        return step

    def _sampling_of(self, plan: StepPlan) -> SamplingBatch:
        if plan.decodes is not None:
            ended = plan.decodes.sequences
        else:
            ended = [item.sequence for item in plan.scheduled if item.reaches_end]
        if self._num_guided:
            # On a GPU, while it computes.
            self._compute_masks(ended)
        return SamplingBatch(ended, self._requests, self._runner.device)

    def _compute_masks(self, ended: SequenceOf[Sequence]) -> None:
        for sequence in ended:
            live = self._requests[sequence.request_id]
            for each in (live, *live.followers):
                if each.guide is not None:
                    each.guide.refresh()

    def _record(self, plan: StepPlan, result: StepResult | None) -> list[RequestEvent]:
        if result is None:
            return []
        self._scheduler.complete(plan)
        self._num_steps += 1
        self._num_computed_tokens += plan.num_tokens
        decodes, is_plain = plan.decodes, result.batch.is_plain and not result.broken_rows
        # Those that the scheduler still has: nobody has left since the step was launched.
        if decodes is not None and decodes is self._scheduler.decodes and is_plain:
            events = self._append_all(decodes, result)
        else:
            events = self._append_each(result)
        if not self._requests:
            # What was launched for those that have just ended is not waited for.
            self._in_flight = self._last_sampled = None
        return events

    def _append_all(self, decodes: DecodeRows, result: StepResult) -> list[RequestEvent]:
        """As `_append_each`, of a step in which nothing but their tokens tells most rows apart."""
        answers, tokens = result.batch.answers, result.tokens
        self._scheduler.read_all(decodes, tokens)
        events = answers.events(tokens)
        for row in answers.ending(tokens):
            events[row] = self._appended(result.batch.sampled[row], tokens[row], result.logprobs_of(row))
        return events

    def _append_each(self, result: StepResult) -> list[RequestEvent]:
        broken_sequences = [sequence for sequence in result.broken if self._is_served(sequence)]
        for sequence in broken_sequences:
            self._tables.taint(sequence)
        # Once a request: one with choices may have several sequences in a step.
        broken = dict.fromkeys(sequence.request_id for sequence in broken_sequences)
        events = [self._fail(self._requests[request_id], _NOT_FINITE) for request_id in broken]
        drawn = [each for each in result.drawn() if self._is_wanted(each[0])]
        for (_, live, sequence, _), _, _ in drawn:
            if live.followers:
                self._start_followers(live, sequence)
        for sampled, token, logprobs in drawn:
            self._scheduler.read(sampled.sequence, token)
            events.append(self._appended(sampled, token, logprobs))
        for sequence, score in result.scores:
            events += self._reach(sequence, score)
        return events

    def _is_wanted(self, sampled: SampledRow) -> bool:
        """Whether a token is still its request's next one: that may have ended, or lost whom it followed, meanwhile."""
        _, live, sequence, leader = sampled
        return self._requests.get(sequence.request_id) is live and live.leader is leader

    def _appended(self, sampled: SampledRow, token: int, logprobs: tuple[TokenLogprobs, ...]) -> RequestEvent:
        """What a sequence's new token brings its request, and perhaps ends it."""
        _, live, sequence, _ = sampled
        try:
            reason = live.finish_reason(token, len(sequence.token_ids) - sequence.num_prompt_tokens)
        # The stop checker and the grammar are the caller's: whatever they raise is that request's fault alone.
        except Exception as error:
            logger.exception("request %s failed on its token %d", sequence.request_id, token)
            return self._fail(live, _one_line(error))
        collected = sequence.prompt_logprobs
        prompt_logprobs = collected.entries() if collected is not None and live.is_first(sequence) else None
        new = (token, *live.forced) if live.forced else (token,)
        event = RequestEvent(
            sequence.request_id, new, reason, sequence.num_cached_tokens, None, None, logprobs, prompt_logprobs
        )
        return event if reason is None else self._end(live, event)

    def _reach(self, sequence: Sequence, logprobs: list[float]) -> list[RequestEvent]:
        """Note a choice node's scores; the request's event when it was the last node."""
        if not self._is_served(sequence):
            return []
        live = self._requests[sequence.request_id]
        following = live.reach(sequence, logprobs)
        self._scheduler.finish(sequence)
        for other in following:
            self._scheduler.add(other)
        return [] if live.sequences else [self._end(live, live.decide())]

    def _leader_of(self, live: LiveRequest) -> LiveRequest | None:
        """The request whose prompt this one is to share, if it is still to be computed."""
        request = live.request
        leader = self._requests.get(request.fork_of) if request.fork_of is not None else None
        if leader is None or live.tree is not None or request.params.prompt_logprobs is not None:
            return None
        # Its first token does not come from the prompt's logits.
        if request.resume_token_ids:
            return None
        if list(leader.request.prompt_token_ids) != list(request.prompt_token_ids):
            raise InvalidRequestError(f"fork_of names {request.fork_of!r}, which has another prompt")
        return leader if leader.waits_for_prompt and leader.request.priority == request.priority else None

    def _start_followers(self, live: LiveRequest, parent: Sequence) -> None:
        """Start those that waited for a request's prompt, which is now computed."""
        followers, live.followers = live.followers, []
        children = [follower.sequences[0] for follower in followers]
        copies = [copy for child in children for copy in self._scheduler.fork(parent, child)]
        for follower in followers:
            follower.leader = None
        if copies:
            self._copy(copies, children)

    def _copy(self, copies: list[tuple[int, int]], children: Iterable[Sequence]) -> None:
        try:
            self._runner.memory.copy(copies)
        except BaseException:
            for child in children:
                if child.block_table:
                    self._scheduler.start_over(child)
            raise

    def _fail(self, live: LiveRequest, error: str) -> RequestEvent:
        event = RequestEvent(live.request.request_id, (), FinishReason.ERROR, live.num_cached_tokens, error=error)
        return self._end(live, event)

    def _end(self, live: LiveRequest, event: RequestEvent) -> RequestEvent:
        self._drop(live)
        return event

    def _drop(self, live: LiveRequest) -> None:
        """Forget a request; the first of those that waited for its prompt computes it for the others."""
        del self._requests[live.request.request_id]
        self._num_guided -= live.guide is not None
        for sequence in live.sequences:
            if live.leader is None:
                self._scheduler.finish(sequence)
            else:
                self._scheduler.leave(sequence)
        if live.leader is not None:
            live.leader.followers.remove(live)
        if live.followers:
            heir, *others = live.followers
            heir.leader, heir.followers = None, others
            for other in others:
                other.leader = heir
            self._scheduler.add(heir.sequences[0])

    def _zero_tainted_blocks(self) -> None:
        if blocks := self._cache.to_be_zeroed():
            self._runner.memory.zero(blocks)
            self._cache.zeroed(blocks)


def _swap_space(runner: Runner, config: EngineConfig) -> SwapSpace | None:
    num_bytes = config.swap_space_bytes
    if num_bytes is None:
        num_bytes = 4 * 1024**3 if runner.device.type == "cuda" else 0
    num_blocks = num_bytes // runner.memory.block_bytes
    return SwapSpace(num_blocks, runner.memory.block_bytes, runner.preemption_costs) if num_blocks else None


def _is_async(runner: Runner, config: EngineConfig) -> bool:
    return runner.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
