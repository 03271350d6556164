"""Whatever arrives, in whatever order, in however little memory: no block is lost and no answer changes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request, SamplingParams

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
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    max_tokens=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 2**63 - 1),
    ignore_eos=st.booleans(),
)
choices = st.lists(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6, unique=True
).map(tuple)
configs = st.builds(
    EngineConfig,
    block_size=st.sampled_from([1, 2, 4, 8]),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 24),
    enable_prefix_caching=st.booleans(),
)
# Longest prompt, longest choice, one token to generate.
LONGEST_REQUEST = 8 + 6 + 4 + 1


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and failures in any order; afterwards everything left is run to its end."""

    engine: Engine
    runner: FakeRunner

    @initialize(config=configs, spare_blocks=st.integers(0, 6))
    def start(self, config: EngineConfig, spare_blocks: int) -> None:
        num_blocks = -(-LONGEST_REQUEST // config.block_size) + spare_blocks
        self.runner = FakeRunner(num_blocks, config.block_size)
        self.engine = fake_engine(self.runner, config)
        self.live: dict[str, Request] = {}
        self.events: dict[str, list[Any]] = {}
        self.num_added = 0

    @rule(prompt=prompts, params=params)
    def add(self, prompt: list[int], params: SamplingParams) -> None:
        self._add(Request(str(self.num_added), prompt, params))

    @rule(prompt=prompts, choices=choices)
    def add_choices(self, prompt: list[int], choices: tuple[tuple[int, ...], ...]) -> None:
        greedy = SamplingParams(temperature=0, choices=[str(choice) for choice in choices])
        self._add(Request(str(self.num_added), prompt, greedy, choices))

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self.live[request.request_id] = request
        self.events[request.request_id] = []
        self.num_added += 1

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

    @precondition(lambda self: self.engine.stats.num_running or self.engine.stats.num_waiting)
    @rule()
    def fail(self) -> None:
        self.runner.fail_next = MemoryError
        with pytest.raises(MemoryError):
            self.engine.step()

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
            assert token_ids(events) == fake_answer(request, self.engine.max_model_len)
            expected_logprobs = request.params.logprobs is not None
            assert all(len(event.logprobs) == expected_logprobs * len(event.new_token_ids) for event in events)
            return
        expected = choice_probabilities(fake_logits, request.prompt_token_ids, request.choice_token_ids, END_TOKEN_ID)
        assert events[-1].choice_probabilities == pytest.approx(expected, abs=1e-6)
        assert expected[events[-1].choice_index] == pytest.approx(max(expected))

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


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_machine_meets_preemption_and_the_prefix_cache():
    """The property is worth as much as the situations it gets into: these it meets at once."""
    config = EngineConfig(block_size=2, max_num_seqs=4, max_num_batched_tokens=24)
    engine = fake_engine(FakeRunner(12, 2), config)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    cached = 0
    for index in range(4):
        engine.add(Request(str(index), [1] * 8 + [index], replace(greedy, seed=index)))
    while engine.has_work:
        cached += sum(event.num_cached_tokens for event in engine.step())
        engine.check()
    assert engine.stats.num_preemptions > 0
    assert cached > 0
