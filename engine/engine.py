"""Requests in, tokens out: synchronous, deterministic, without I/O."""

import logging
from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from traceback import clear_frames
from typing import TypeGuard

import torch

from .checkpoints.model_config import ModelConfig
from .checkpoints.vision_config import VisionConfig
from .config import EngineConfig
from .errors import EngineDeadError, one_line
from .execution.device_faults import is_lost, is_out_of_memory, release_cached_memory
from .execution.loaded_guessing import load_guessing
from .execution.memory_budget import NO_SECOND_MODEL
from .execution.model_runner import ModelRunner
from .execution.proposer import Proposer
from .execution.runner import Runner
from .kv_cache.block_hashes import ROOT, hash_blocks, salted
from .kv_cache.block_pool import BlockPool
from .kv_cache.prefix_cache import PrefixCache
from .kv_cache.state_pool import StatePool
from .kv_cache.swap import SwapSpace
from .logprobs import TokenLogprobs
from .lora_request import LoRARequest
from .parallel.parallel_runner import ParallelRunner
from .request import Request, RequestEvent
from .scheduling.block_tables import BlockTables
from .scheduling.scheduler import Scheduler
from .scheduling.speculation import Speculation
from .scheduling.state_tables import StateTables
from .scheduling.step_plan import StepPlan
from .serving.admission import Admission, require_context, resolve_max_model_len
from .serving.served_requests import ServedRequests
from .speculative.guessers import require_guessing_fits
from .steps.in_flight import StepInFlight
from .steps.step_events import StepEvents
from .steps.step_launcher import StepLauncher
from .steps.step_result import StepResult

logger = logging.getLogger(__name__)


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
    # For how long steps had nothing to do but wait for the device.
    waited_seconds: float
    # Guessed, and guessed right: with `speculative_config`.
    num_draft_tokens: int
    num_accepted_tokens: int


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        max_position_embeddings: int,
        eos_token_ids: SequenceOf[int] = (),
        proposer: Proposer | None = None,
        vision: VisionConfig | None = None,
    ) -> None:
        self._runner = runner
        self._config = config
        self._vision = vision
        memory = runner.memory
        block_bytes = memory.block_bytes + (proposer.block_bytes if proposer else 0)
        self.max_model_len = resolve_max_model_len(
            config, memory.num_blocks, block_bytes, runner.sliding_window, max_position_embeddings
        )
        self._cache = PrefixCache(BlockPool(memory.num_blocks), config.enable_prefix_caching)
        states = StateTables(StatePool(runner.num_states, self._cache.is_announced)) if runner.num_states else None
        swap_space = None if states else _swap_space(runner, config)
        self._tables = BlockTables(self._cache, runner.sliding_window, swap_space, states)
        drafter = proposer.drafter if proposer else None
        self._speculation = Speculation(config.speculative, drafter) if config.speculative is not None else None
        self._scheduler = Scheduler(self._tables, config.max_num_seqs, config.max_num_batched_tokens, self._speculation)
        admission = Admission(
            self.max_model_len,
            runner.vocab_size,
            tuple(eos_token_ids),
            config.block_size,
            config.seed,
            runner.loras,
            vision,
        )
        self._requests = ServedRequests(admission, self._scheduler, memory)
        self._launcher = StepLauncher(runner, self._scheduler, self._requests, config.block_size, proposer)
        self._events = StepEvents(self._scheduler, self._tables, self._requests)
        self._is_async = _is_async(runner, config)
        # The step that was launched before the last one was read.
        self._in_flight: StepInFlight | None = None
        self._num_steps = 0
        self._num_launched_steps = 0
        self._num_computed_tokens = 0
        self._waited_seconds = 0.0
        self._step_began = 0.0
        self._death: EngineDeadError | None = None
        self._when_dead: list[Callable[[str], None]] = []

    @classmethod
    def from_pretrained(cls, model: str | Path, config: EngineConfig | None = None) -> "Engine":
        """Load a Hugging Face model folder, or a GGUF file. Raises `ModelError` or `ConfigError`."""
        config = config or EngineConfig()
        model_config = ModelConfig.from_pretrained(model)
        # Before the weights, and tables as long, are in memory.
        require_context(config, model_config.max_position_embeddings)
        if config.speculative is not None:
            require_guessing_fits(config.speculative, model_config)
        context, eos_token_ids = model_config.max_position_embeddings, model_config.eos_token_ids
        if config.world_size > 1:
            ranks = ParallelRunner.start(model_config, config)
            return cls(ranks, config, context, eos_token_ids, vision=model_config.vision)
        loaded = load_guessing(config, model_config)
        runner = ModelRunner(model_config, config, loaded.needs if loaded else NO_SECOND_MODEL)
        proposer = loaded.beside(runner) if loaded else None
        return cls(runner, config, context, eos_token_ids, proposer, model_config.vision)

    def close(self) -> None:
        """End the processes that share its model, if there are any; nothing can be computed then."""
        if self._runner.processes is not None:
            self._runner.processes.close()

    def show_others(self) -> None:
        """Have the processes that share its model write what their threads are at to standard error."""
        if self._runner.processes is not None:
            self._runner.processes.show()

    def call_when_dead(self, function: Callable[[str], None]) -> None:
        """Have it called once, in any thread, with why nothing can be computed any more, should it come to that.

        So it is where one of the processes that share its model is gone, or where the GPU is lost to this process;
        `step` raises `EngineDeadError` then.
        """
        if self._runner.processes is not None:
            self._runner.processes.call_when_dead(function)
        elif self._death is None:
            self._when_dead.append(function)
        else:
            function(str(self._death))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def num_launched_steps(self) -> int:
        """How many steps have been begun, those among them that failed and were tried apart."""
        return self._num_launched_steps

    @property
    def num_generated_tokens(self) -> int:
        """How many tokens all answers have got so far."""
        return self._events.num_tokens

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._scheduler.waiting) + len(self._requests.parked),
            num_running=len(self._scheduler.running),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_swaps=self._tables.num_swaps,
            num_blocks=self._cache.num_blocks,
            num_available_blocks=self._cache.num_available,
            waited_seconds=self._waited_seconds,
            num_draft_tokens=self._speculation.num_draft_tokens if self._speculation else 0,
            num_accepted_tokens=self._speculation.num_accepted_tokens if self._speculation else 0,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` when it could never run; nothing changes then."""
        self._requests.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its KV blocks; false when it is not here (any more)."""
        return self._requests.abort(request_id)

    def watch(self, request_id: str) -> RequestEvent | None:
        """From now on tell of each step what it brings a request that was added as `FINAL_ONLY`.

        Returns what it has by now and no event has told of, None where that is nothing.
        """
        return self._requests.watch(request_id)

    def untold(self, request_id: str) -> tuple[SequenceOf[int], SequenceOf[TokenLogprobs]]:
        """The tokens that a request has and no event has told of, without those that it was resumed from.

        Of their log-probabilities, where it asks for any, the last may be missing. The one method that other threads
        may call as well: they see what the engine's thread has just come to.
        """
        if (served := self._requests.by_id.get(request_id)) is None:
            return (), ()
        # In this order: what the engine's thread comes to meanwhile has its token first. Of one that is told of
        # meanwhile there are no tokens any more.
        logprobs, token_ids = served.untold_logprobs[:], served.untold_token_ids()
        return token_ids, logprobs[: len(token_ids)]

    def expect_prefix(
        self,
        token_ids: SequenceOf[int],
        num_requests: int,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Announce requests whose prompts begin with these tokens: until they have come, its blocks are evicted last.

        For a caller who knows more than the queue: rows not added yet, or which of the waiting ones share what. A
        request counts as come when it is first admitted, or ends before that. A negative number takes back. Of requests
        with a LoRA adapter nothing is announced before it is held, nor while some wait for theirs: those of them that
        are aborted would never count as come. Of a prompt with images it is announced up to the first.
        """
        if lora_request is not None and self._requests.parked and num_requests > 0:
            return
        if self._vision is not None and self._vision.image_token_id in token_ids:
            # What follows depends on the image too.
            token_ids = token_ids[: list(token_ids).index(self._vision.image_token_id)]
        loras = self._runner.loras
        root = ROOT if lora_request is None or loras is None else loras.hash_root(lora_request)
        if root is not None:
            hashes = hash_blocks(token_ids, self._config.block_size, salted(root, cache_salt))
            self._scheduler.expected.expect(hashes, num_requests)

    def step(self) -> list[RequestEvent]:
        """Compute one batch and return what it brought, at most one event a request.

        With `async_scheduling` the next batch is launched before this one is read, wherever it does not depend on
        what is read; what was computed for a request that has ended meanwhile is thrown away.

        Where the model or the sampling raises, the step is undone and its requests are tried apart: those that fail
        alone end with `FinishReason.ERROR`, the others go on. When the device is out of memory the step is tried with
        fewer tokens first. What is no `Exception` (KeyboardInterrupt) goes to the caller: the next call reads the step
        if it was launched, else it is undone. Raises `EngineDeadError` where no other step can be computed.
        """
        if self._death is not None:
            raise self._death
        try:
            self._zero_tainted_blocks()
            events = self._step()
            return self._requests.end_decided() + events + self._requests.admit_parked()
        except Exception as error:
            if _is_recoverable(error):
                self._require_device(error)
            raise

    def check(self) -> None:
        """Assert that every KV block is accounted for. For tests."""
        self._scheduler.check()

    def _step(self, among: Container[str] | None = None) -> list[RequestEvent]:
        """Read one step, of the requests named or of all, and whatever it takes to get past an error.

        It may have been launched before; where it can, the next one is launched first.
        """
        self._num_launched_steps += 1
        step = self._in_flight
        if step is None:
            self._step_began = perf_counter()
            plan = self._scheduler.schedule(among)
            if not plan.scheduled and not plan.swapped_out:
                return []
            try:
                step = self._launcher.launch(plan, self._is_async and among is None)
            except BaseException as error:
                self._scheduler.undo(plan)
                if not _is_recoverable(error):
                    raise
                return self._recover(plan, error, among)
        # Should anything but an error interrupt what follows, it is read next time.
        self._in_flight = step
        following = self._look_ahead(step)
        try:
            result = step.read()
        except BaseException as error:
            self._launcher.forget_last()
            if following is not None:
                self._scheduler.take_back(following.plan, following.unread)
            if not _is_recoverable(error):
                raise
            self._in_flight = None
            self._scheduler.take_back(step.plan, step.unread)
            return self._recover(step.plan, error, among)
        if following is not None and result is not None and self._events.anyone_tries_again(result):
            self._launcher.forget_last()
            self._scheduler.take_back(following.plan, following.unread)
            following = None
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
            self._scheduler.undo(plan, was_begun=False)
            return None
        try:
            return self._launcher.launch(plan, True, step.sampled)
        except BaseException as error:
            self._scheduler.undo(plan)
            if not _is_recoverable(error):
                raise
            clear_frames(error.__traceback__)
            logger.debug("a step ahead failed, it is tried again in its turn: %s", error)
            return None

    def _recover(self, plan: StepPlan, error: Exception, among: Container[str] | None) -> list[RequestEvent]:
        self._require_device(error)
        # The failed step's tensors hang on its frames: they are not to be in the way of the next try.
        clear_frames(error.__traceback__)
        if is_out_of_memory(error) and self._scheduler.budget.shrink(plan.num_tokens):
            release_cached_memory(self._runner.device)
            logger.warning("out of memory with %d tokens in a step, trying half: %s", plan.num_tokens, error)
            return self._step(among)
        tried = {item.sequence.request_id: item.sequence for item in plan.scheduled}
        # Some may have ended while the step was in flight.
        suspects = [request_id for request_id, sequence in tried.items() if self._requests.is_served(sequence)]
        # It may have been a guess: tried again there is none.
        for item in plan.scheduled if plan.num_draft_tokens else ():
            item.sequence.speculates_up_to = 0
        if len(tried) == 1 and suspects and not plan.num_draft_tokens:
            logger.error("request %s fails", suspects[0], exc_info=error)
            return [self._requests.fail(self._requests.by_id[suspects[0]], one_line(error))]
        logger.warning("a step of %d requests failed, trying them apart: %s", len(tried), error)
        half = len(suspects) // 2
        return [event for part in (suspects[:half], suspects[half:]) if part for event in self._step(frozenset(part))]

    def _require_device(self, error: Exception) -> None:
        """Raises `EngineDeadError` where the device computes nothing any more: no request is to be blamed for that."""
        if self._runner.processes is not None or not is_lost(self._runner.device):
            return
        self._death = EngineDeadError(f"the GPU is lost to this process, start another one: {one_line(error)}")
        for function in self._when_dead:
            function(str(self._death))
        raise self._death from error

    def _record(self, plan: StepPlan, result: StepResult | None) -> list[RequestEvent]:
        if result is None:
            return []
        self._scheduler.complete(plan)
        self._time_step(plan)
        self._num_steps += 1
        self._num_computed_tokens += plan.num_tokens
        self._waited_seconds += result.waited_seconds
        events = self._events.of(plan, result)
        if not self._requests:
            # What was launched for those that have just ended is not waited for.
            self._in_flight = None
            self._launcher.forget_last()
        return events

    def _time_step(self, plan: StepPlan) -> None:
        """A step begins when the one before it ends, or when it is planned where none is in flight."""
        begin, self._step_began = self._step_began, perf_counter()
        num_tokens = plan.num_tokens - plan.num_draft_tokens
        self._scheduler.budget.took(self._step_began - begin, num_tokens, len(plan.scheduled))

    def _zero_tainted_blocks(self) -> None:
        if blocks := self._cache.to_be_zeroed():
            self._runner.memory.zero(blocks)
            self._cache.zeroed(blocks)


def _is_recoverable(error: BaseException) -> TypeGuard[Exception]:
    """Whether requests may be tried again after it: no interrupt, and not the engine's own end."""
    return isinstance(error, Exception) and not isinstance(error, EngineDeadError)


def _swap_space(runner: Runner, config: EngineConfig) -> SwapSpace | None:
    num_bytes = config.swap_space_bytes
    if num_bytes is None:
        num_bytes = 4 * 1024**3 if runner.device.type == "cuda" else 0
    num_blocks = num_bytes // runner.memory.block_bytes
    return SwapSpace(num_blocks, runner.memory.block_bytes, runner.preemption_costs) if num_blocks else None


def _is_async(runner: Runner, config: EngineConfig) -> bool:
    return runner.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
