"""Whatever arrives, in whatever order, in however little memory: no block is lost and no answer changes."""

from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.draft_model import DraftModel
from headrace.engine.request import FinishReason, Request, RequestEvent, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scheduling import state_tables
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.step_plan import StepPlan
from headrace.engine.scheduling.token_budget import TokenBudget
from headrace.engine.serving import served_request
from headrace.engine.structured.choices import build_choice_tree

from .brute_force import choice_probabilities
from .fakes import END_TOKEN_ID, VOCAB_SIZE, FakeRunner, fake_answer, fake_engine, fake_logits
from .running import token_ids

tokens = st.integers(1, VOCAB_SIZE - 1)
# Prompts begin alike, so that caching has something to find.
shared_prefix = st.sampled_from([[], [1] * 8, [1, 2] * 4, [1] * 4 + [2] * 4])
prompts = st.builds(list.__add__, shared_prefix, st.lists(tokens, min_size=1, max_size=6))
params = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.6]),
    min_tokens=st.sampled_from([0, 0, 1]),
    logit_bias=st.sampled_from([None, None, {END_TOKEN_ID: 1.5, 3: -2.0}]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    max_tokens=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 2**63 - 1),
    ignore_eos=st.booleans(),
)
choices = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6, unique=True
).map(tuple)


def config_of(**options: Any) -> EngineConfig:
    """Without guesses where a step has no room for them."""
    speculative = options["speculative_config"]
    has_room = speculative is None or speculative["num_speculative_tokens"] < options["max_num_batched_tokens"]
    return EngineConfig(**options if has_room else {**options, "speculative_config": None})


configs = st.builds(
    config_of,
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    enable_prefix_caching=st.booleans(),
    swap_space_bytes=st.sampled_from([0, 0, 4, 100]),
    async_scheduling=st.booleans(),
    speculative_config=st.sampled_from(
        [
            None,
            {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": 3},
            {"num_speculative_tokens": 2, "prompt_lookup_min": 1},
            {"num_speculative_tokens": 3, "model": "the draft", "disable_by_batch_size": 3},
            {"num_speculative_tokens": 2, "model": "the draft"},
        ]
    ),
)
windows = st.sampled_from([None, None, 1, 5, 8])
# Of a model with recurrent states: a few, so that they run out.
state_numbers = st.sampled_from([0, 0, 2, 4, 9])
priorities = st.sampled_from([0, 0, 0, -1, 2])
output_kinds = st.sampled_from(RequestOutputKind)
# Longest prompt, longest choice, one token to generate.
LONGEST_REQUEST = 8 + 6 + 4 + 1
# Room for the longest one and then some: whatever can happen to an answer happens within so many tokens.
MOST_TOKENS = 32
# A step that computes this token raises; after this one the logits are NaN.
POISON, BREAKS = 10, 9


class FixedBudget(TokenBudget):
    """Learns nothing from steps' times."""

    def __init__(self, full: int, beside_urgent: int) -> None:
        super().__init__(full)
        self.beside_urgent = beside_urgent

    def took(self, seconds: float, num_tokens: int, num_sequences: int) -> None:
        pass


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and failures in any order; afterwards everything left is run to its end."""

    engine: Engine
    runner: FakeRunner
    second: FakeRunner

    @initialize(
        config=configs,
        window=windows,
        num_states=state_numbers,
        spare_blocks=st.integers(0, 6),
        is_harsh=st.booleans(),
        beside_urgent=st.sampled_from([24, 1, 4]),
    )
    def start(
        self,
        config: EngineConfig,
        window: int | None,
        num_states: int,
        spare_blocks: int,
        is_harsh: bool,
        beside_urgent: int,
    ) -> None:
        if num_states:
            config, window = replace(config, speculative_config=None), None
        longest = LONGEST_REQUEST if window is None else window - 1 + config.block_size
        num_blocks = -(-longest // config.block_size) + spare_blocks
        # The second one sees so little that it is often wrong.
        self.runner = FakeRunner(num_blocks, config.block_size, window, num_states)
        self.second = FakeRunner(num_blocks, config.block_size, 3)
        if is_harsh:
            self.runner.poison, self.runner.breaks = POISON, BREAKS
            self.second.poison = POISON
        # What slides out of a window is not there for it.
        is_drafted = config.speculative is not None and config.speculative.model is not None and window is None
        draft = DraftModel(self.second, MOST_TOKENS - 4, VOCAB_SIZE, config.block_size) if is_drafted else None
        self.engine = fake_engine(self.runner, config, MOST_TOKENS, draft)
        check_every_plan(self.engine)
        self.engine._scheduler.budget = FixedBudget(config.max_num_batched_tokens, beside_urgent)
        self.live: dict[str, Request] = {}
        self.events: dict[str, list[RequestEvent]] = {}
        self.num_added = 0

    @rule(prompt=prompts, params=params, priority=priorities, output_kind=output_kinds, is_conversation=st.booleans())
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        output_kind: RequestOutputKind,
        is_conversation: bool,
    ) -> None:
        request = Request(str(self.num_added), prompt, params, priority=priority, output_kind=output_kind)
        self._add(replace(request, is_conversation=is_conversation))

    @rule(prompt=prompts, params=params, num_samples=st.integers(2, 4), priority=priorities)
    def add_samples(self, prompt: list[int], params: SamplingParams, num_samples: int, priority: int) -> None:
        first = str(self.num_added)
        for index in range(num_samples):
            fork_of = first if index else None
            sample = replace(params, seed=index, temperature=1.0)
            self._add(Request(str(self.num_added), prompt, sample, priority=priority, fork_of=fork_of))

    @rule(prompt=prompts, choices=choices, priority=priorities)
    def add_choices(self, prompt: list[int], choices: tuple[tuple[int, ...], ...], priority: int) -> None:
        greedy = SamplingParams(temperature=0, choices=[str(choice) for choice in choices])
        self._add(Request(str(self.num_added), prompt, greedy, choices, priority=priority))

    @rule(prompt=prompts, params=params, priority=priorities, data=st.data())
    def resume(self, prompt: list[int], params: SamplingParams, priority: int, data: st.DataObject) -> None:
        whole = Request(str(self.num_added), prompt, params, priority=priority)
        answer = fake_answer(whole, self.engine.max_model_len, self.runner.sliding_window)
        known = answer[: data.draw(st.integers(0, len(answer)))]
        fork_of = data.draw(st.sampled_from([None, *self.live]))
        shares = fork_of is not None and list(self.live[fork_of].prompt_token_ids) == prompt
        self._add(replace(whole, resume_token_ids=known, fork_of=fork_of if shares else None))

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self.live[request.request_id] = request
        self.events[request.request_id] = []
        self.num_added += 1

    @rule(prompt=prompts, count=st.integers(-2, 5))
    def expect(self, prompt: list[int], count: int) -> None:
        self.engine.expect_prefix(prompt, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def watch(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        if (event := self.engine.watch(request_id)) is not None:
            self.events[request_id].append(event)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.abort(request_id)
        del self.live[request_id]

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(fits=st.one_of(st.none(), st.integers(1, 10)))
    def limit_device_memory(self, fits: int | None) -> None:
        self.runner.fits = self.second.fits = fits

    @precondition(lambda self: self.engine.stats.num_running or self.engine.stats.num_waiting)
    @rule()
    def interrupt(self) -> None:
        self.runner.fail_next = KeyboardInterrupt
        with suppress(KeyboardInterrupt):
            self._step()
        self.runner.fail_next = None

    def _step(self) -> None:
        for event in self.engine.step():
            self.events[event.request_id].append(event)
            if event.finished:
                self._check_answer(self.live.pop(event.request_id))
        self.engine.check()

    def _check_answer(self, request: Request) -> None:
        events = self.events[request.request_id]
        assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
        assert 0 <= events[-1].num_cached_tokens <= len(request.prompt_token_ids)
        if request.choice_token_ids is None:
            self._check_tokens(request, events)
        else:
            self._check_choice(request, events[-1])

    def _check_tokens(self, request: Request, events: list[RequestEvent]) -> None:
        answer = fake_answer(request, self.engine.max_model_len, self.runner.sliding_window)
        prompt = list(request.prompt_token_ids)
        first = len(request.resume_token_ids)
        fails_at = self._first_failure(prompt, answer, first)
        assert token_ids(events) == answer[first:fails_at]
        assert (events[-1].finish_reason is FinishReason.ERROR) == (fails_at is not None)
        expected_logprobs = request.params.logprobs is not None
        assert all(len(event.logprobs) == expected_logprobs * len(event.new_token_ids) for event in events)

    def _first_failure(self, prompt: list[int], answer: list[int], first: int) -> int | None:
        """After how many tokens of its answer a request that knows the `first` ones fails, if it does."""
        for length in range(first, len(answer)):
            tokens = prompt + answer[:length]
            if self.runner.poison in tokens or tokens[-1] == self.runner.breaks:
                return length
        return None

    def _check_choice(self, request: Request, event: RequestEvent) -> None:
        assert request.choice_token_ids is not None
        nodes = build_choice_tree(request.choice_token_ids, END_TOKEN_ID).nodes
        prompt, window = request.prompt_token_ids, self.runner.sliding_window
        ends_broken = prompt[-1] == self.runner.breaks and bool(nodes) and not nodes[0].path
        if (nodes and self.runner.poison in prompt) or ends_broken:
            assert event.finish_reason is FinishReason.ERROR
            return

        def seen_logits(tokens: list[int]) -> Tensor:
            return fake_logits(tokens if window is None else tokens[-window:])

        expected = choice_probabilities(seen_logits, prompt, request.choice_token_ids, END_TOKEN_ID)
        assert event.choice_index is not None
        assert event.choice_probabilities == pytest.approx(expected, abs=1e-6)
        assert expected[event.choice_index] == pytest.approx(max(expected))

    @invariant()
    def no_block_is_lost(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(100 * (len(self.live) + 1)):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.live, "a request never ended"
        assert (self.engine.stats.num_running, self.engine.stats.num_waiting) == (0, 0)


def check_every_plan(engine: Engine) -> None:
    """Has every step but the ones that look for a failure's cause checked for who is served before whom."""
    scheduler = engine._scheduler
    schedule = scheduler.schedule

    def checked(among: Container[str] | None = None, is_ahead: bool = False) -> StepPlan:
        beside_urgent = scheduler.budget.beside_urgent
        plan = schedule(among, is_ahead)
        if among is None:
            check_order(scheduler, plan)
        assert sum(item.num_tokens for item in plan.scheduled if plan.makes_urgent_wait(item.sequence)) <= beside_urgent
        return plan

    scheduler.schedule = checked  # type: ignore[method-assign]


def check_order(scheduler: Scheduler, plan: StepPlan) -> None:
    """Assert that nobody is served in a step while someone more urgent goes short."""
    served = {item.sequence.turn: item.sequence for item in plan.scheduled}
    left = [each for each in (*scheduler.waiting, *scheduler.running) if each.turn not in served]
    # Where a prompt is cut for the sake of others, it goes short of nothing.
    cut = [sequence for sequence, _ in plan.snapshots]
    left += [item.sequence for item in plan.scheduled if not item.reaches_end and item.sequence not in cut]
    # Nor where it would keep the most urgent waiting.
    if not plan.budget_beside_urgent:
        left = [each for each in left if not plan.makes_urgent_wait(each)]
    most_urgent_left = min((each.priority for each in left if each.num_uncomputed_tokens), default=None)
    for sequence in served.values():
        assert most_urgent_left is None or sequence.priority <= most_urgent_left, "bulk is before the urgent"


@pytest.fixture(autouse=True, scope="module")
def _states_are_kept_for_any_gain() -> Iterator[None]:
    """Prompts are short here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tables, "_MIN_TOKENS", 1)
        patch.setattr(served_request, "_OPENING_TOKENS", 2)
        yield


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("swap_space_bytes", [0, 100])
def test_the_machine_meets_preemption_and_the_prefix_cache(swap_space_bytes):
    """The property is worth as much as the situations it gets into: these it meets at once."""
    config = EngineConfig(block_size=2, max_num_seqs=4, max_num_batched_tokens=24, swap_space_bytes=swap_space_bytes)
    engine = fake_engine(FakeRunner(12, 2), config)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    cached = most_owners = 0
    for index in range(4):
        engine.add(Request(str(index), [1] * 8 + [index], replace(greedy, seed=index)))
    while engine.has_work:
        cached += sum(event.num_cached_tokens for event in engine.step())
        engine.check()
        runs = [each.shared_run for each in engine._scheduler.running]
        most_owners = max([most_owners, *(run.num_owners for run in runs if run is not None)])
    assert engine.stats.num_preemptions > 0
    assert cached > 0
    assert most_owners > 1
