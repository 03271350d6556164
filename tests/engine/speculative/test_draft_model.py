"""A second model guesses, in the blocks of the first: the same answers in fewer steps, whoever has the blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.draft_model import DraftModel
from headrace.engine.request import Request

from ..fakes import CONTEXT, VOCAB_SIZE, FakeRunner, fake_answer, fake_engine, make_engine
from ..running import greedy_params, run_all, token_ids
from .test_speculation import DRAWN, PREFIX, of_all_kinds, told

GREEDY = greedy_params(30)


class FakeDraft(FakeRunner):
    """Counts what it computes. `padding`: how many tokens its vocabulary has that the first model's has not.

    `errs_at`: after the token of this position it says something else.
    """

    padding = 0
    errs_at: int | None = None
    num_computed = 0
    largest_step = 0

    def execute(self, batch: Batch) -> Tensor:
        assert batch.token_ids.max() < self.vocab_size, "a token that it has no vector for"
        self.num_computed += len(batch.token_ids)
        self.largest_step = max(self.largest_step, len(batch.token_ids))
        logits = super().execute(batch)
        if self.errs_at is not None:
            logits[batch.positions[batch.last_token_index] == self.errs_at] *= -1
        return torch.cat([logits, torch.full((len(logits), self.padding), 99.0)], dim=1)


def make_drafted(num_blocks: int = 64, sees: int | None = None, **options: Any) -> tuple[Engine, FakeDraft]:
    """An engine whose second model is its first one, or one that `sees` so many tokens only."""
    speculative = {"model": "the draft", "num_speculative_tokens": 4, **options.pop("speculative_config", {})}
    config = EngineConfig(**{"block_size": 8, "speculative_config": speculative, **options})
    runner, second = (
        FakeRunner(num_blocks, config.block_size),
        FakeDraft(num_blocks, config.block_size, sees),
    )
    draft = DraftModel(second, CONTEXT, VOCAB_SIZE, config.block_size)
    return fake_engine(runner, config, draft=draft), second


OPTIONS: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"block_size": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    {"async_scheduling": True, "max_num_seqs": 3, "block_size": 4},
    # Preempted, with and without a place to swap out to.
    {"num_blocks": 10, "max_model_len": CONTEXT},
    {"num_blocks": 10, "max_model_len": CONTEXT, "swap_space_bytes": 20, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("sees", [None, 1])
def test_answers_are_those_without_guesses(sees, options):
    engine, _ = make_drafted(sees=sees, speculative_config={"disable_by_batch_size": 12}, **options)
    plain, _ = make_engine(**{"num_blocks": 64, **options})
    answers, expected = (run_all(each, of_all_kinds()) for each in (engine, plain))
    assert {name: told(events) for name, events in answers.items()} == {
        name: told(events) for name, events in expected.items()
    }
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_a_second_model_equal_to_the_first_is_right(options):
    """So its KV is that of the tokens that it guesses after: nothing is stale, whoever had the blocks before."""
    engine, _ = make_drafted(**options)
    for _ in range(3):
        requests = [Request(str(index), PREFIX[: 12 + index % 3], greedy_params(20)) for index in range(6)]
        answers = run_all(engine, requests)
        for request in requests:
            assert token_ids(answers[request.request_id]) == fake_answer(request, CONTEXT)
    stats = engine.stats
    # Few where others may need the blocks.
    assert stats.num_accepted_tokens == stats.num_draft_tokens > (20 if "num_blocks" in options else 200)


@pytest.mark.parametrize("errs_at", range(20, 36))
def test_after_a_mistake_it_goes_on_by_what_was_said(errs_at):
    engine, second = make_drafted()
    second.errs_at = errs_at
    request = Request("a", PREFIX, greedy_params(40))
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, CONTEXT)
    # Those after it in its draft, and itself.
    assert engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens <= 4
    assert engine.stats.num_accepted_tokens > 15


def test_one_that_is_never_right_soon_costs_little():
    engine, _ = make_drafted(sees=1)
    request = Request("a", PREFIX, greedy_params(40))
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, CONTEXT)
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens / 3


def test_what_one_sequence_has_brought_the_next_one_finds():
    engine, second = make_drafted()
    run_all(engine, [Request("a", PREFIX, greedy_params(3))])
    before = second.num_computed
    run_all(engine, [Request("b", PREFIX, greedy_params(3))])
    # Of the 20 tokens two blocks of 8 are there, and one token is said before the first guess.
    assert second.num_computed - before == 20 - 16 + 1 + engine.stats.num_draft_tokens // 2 - 1
    # All at once, too.
    before = second.num_computed
    run_all(engine, [Request(str(index), PREFIX[::-1], greedy_params(3), fork_of="0") for index in range(4)])
    assert second.num_computed - before < 2 * 21 + 3 * 10
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens


@pytest.mark.parametrize(("num_requests", "guesses"), [(2, True), (3, False)])
def test_a_larger_batch_does_without_and_costs_the_second_model_nothing(num_requests, guesses):
    engine, second = make_drafted(speculative_config={"disable_by_batch_size": 2})
    run_all(engine, [Request(str(index), PREFIX, greedy_params(20)) for index in range(num_requests)])
    assert (engine.stats.num_draft_tokens > 0) == (second.num_computed > 0) == guesses


def test_rows_that_were_without_guesses_are_caught_up_with():
    engine, _ = make_drafted(speculative_config={"disable_by_batch_size": 2})
    lengths = [40, 40, 8]
    requests = [Request(str(index), PREFIX[index:], greedy_params(length)) for index, length in enumerate(lengths)]
    answers = run_all(engine, requests)
    for request in requests:
        assert token_ids(answers[request.request_id]) == fake_answer(request, CONTEXT)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 20


def test_no_more_is_caught_up_with_in_a_step_than_a_step_may_compute():
    engine, second = make_drafted(max_num_batched_tokens=12, block_size=4, enable_prefix_caching=False)
    requests = [Request(str(index), (PREFIX * 2)[index:], greedy_params(20)) for index in range(2)]
    answers = run_all(engine, requests)
    for request in requests:
        assert token_ids(answers[request.request_id]) == fake_answer(request, CONTEXT)
    assert second.largest_step == 12
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 10


def test_where_guesses_take_all_of_a_steps_tokens_the_next_one_waits():
    """Those of 5 and 7 tokens leave nothing of the 12 to catch up with that of 8."""
    options = {"num_speculative_tokens": 2, "disable_by_batch_size": 3}
    engine, _ = make_drafted(
        max_num_batched_tokens=12, block_size=4, enable_prefix_caching=False, speculative_config=options
    )
    # The last one keeps the others from guessing until they are as long.
    lengths = {2: 20, 4: 20, 5: 20, 1: 3}
    requests = [Request(str(size), PREFIX[:size], greedy_params(length)) for size, length in lengths.items()]
    answers = run_all(engine, requests)
    for request in requests:
        assert token_ids(answers[request.request_id]) == fake_answer(request, CONTEXT)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 20


def test_what_is_guessed_after_a_step_that_was_undone_is_forgotten():
    runner, second = FakeRunner(64, 4), FakeDraft(64, 4)
    config = EngineConfig(block_size=4, speculative_config={"model": "the draft"})
    engine = fake_engine(runner, config, draft=DraftModel(second, CONTEXT, VOCAB_SIZE, 4))
    request = Request("a", PREFIX, GREEDY)
    engine.add(request)
    said = [token for event in engine.step() for token in event.new_token_ids]
    runner.fail_next = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    while engine.has_work:
        said += [token for event in engine.step() for token in event.new_token_ids]
        engine.check()
    assert said == fake_answer(request, CONTEXT)
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 15


def test_nothing_is_guessed_beyond_the_second_models_context():
    config = EngineConfig(block_size=8, speculative_config={"model": "the draft"})
    second = FakeDraft(64, 8)
    engine = fake_engine(FakeRunner(64, 8), config, draft=DraftModel(second, 30, VOCAB_SIZE, 8))
    request = Request("a", PREFIX, greedy_params(40))
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, CONTEXT)
    assert 28 <= max(position for _, position in second.memory.slots.values()) < 30
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


def test_tokens_that_only_pad_its_vocabulary_are_not_guessed():
    engine, second = make_drafted()
    second.padding = 3
    run_all(engine, [Request("a", PREFIX, GREEDY)])
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0


def test_tokens_that_its_vocabulary_lacks_are_taken_for_others():
    """A prompt may have those that pad the first one's; on a GPU to look them up would end the process."""
    engine, second = make_drafted()
    second.vocab_size = max(PREFIX)
    request = Request("a", PREFIX, GREEDY)
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, CONTEXT)
    assert engine.stats.num_draft_tokens > 0


def test_its_failure_is_not_the_requests():
    engine, second = make_drafted()
    requests = [Request(str(index), PREFIX[index:], GREEDY) for index in range(2)]
    for request in requests:
        engine.add(request)
    engine.step()
    second.fail_next = RuntimeError
    events = {request.request_id: fake_answer(request, CONTEXT)[:1] for request in requests}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id] += event.new_token_ids
        engine.check()
    assert events == {request.request_id: fake_answer(request, CONTEXT) for request in requests}
    assert engine.stats.num_draft_tokens == 0


def test_what_it_breaks_is_clean_for_the_next_one():
    engine, second = make_drafted()
    zeroed: list[int] = []
    second.memory.zero = lambda blocks: zeroed.extend(blocks)  # type: ignore[method-assign]
    request = Request("a", PREFIX, GREEDY)
    answer = fake_answer(request, CONTEXT)
    second.breaks = answer[4]
    assert token_ids(run_all(engine, [request])["a"]) == answer
    # Those of the prompt and the first of the answer; after that nothing is guessed.
    assert len(zeroed) == len(set(zeroed)) >= 3
    assert engine.stats.num_draft_tokens <= 8
    second.breaks = None
    assert token_ids(run_all(engine, [Request("b", PREFIX, GREEDY)])["b"]) == answer
    assert engine.stats.num_accepted_tokens >= engine.stats.num_draft_tokens - 4 > 10


def test_where_memory_ends_it_goes_on_without():
    engine, second = make_drafted(max_num_batched_tokens=32)
    second.fits = 3
    requests = [Request(str(index), PREFIX[index:], GREEDY) for index in range(3)]
    answers = run_all(engine, requests)
    for request in requests:
        assert token_ids(answers[request.request_id]) == fake_answer(request, CONTEXT)


def test_aborted_midway_and_resumed():
    engine, _ = make_drafted()
    kept, dropped = Request("kept", PREFIX, GREEDY), Request("dropped", PREFIX[1:], DRAWN)
    engine.add(kept)
    engine.add(dropped)
    said: dict[str, list[int]] = {"kept": [], "dropped": []}
    while len(said["dropped"]) < 6:
        for event in engine.step():
            said[event.request_id] += event.new_token_ids
    assert engine.abort("dropped")
    engine.add(Request("dropped", PREFIX[1:], DRAWN, resume_token_ids=said["dropped"]))
    while engine.has_work:
        for event in engine.step():
            said[event.request_id] += event.new_token_ids
        engine.check()
    assert said == {request.request_id: fake_answer(request, CONTEXT) for request in (kept, dropped)}
