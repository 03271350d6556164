"""Guesses make answers come in fewer steps, and nobody can tell by the answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams

from ..fakes import FakeRunner, fake_answer, make_engine
from ..running import greedy_params, run_all, token_ids

# Looks up single tokens: the fake model's vocabulary is small.
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PREFIX = [token % 5 + 1 for token in range(20)]
DRAWN = SamplingParams(temperature=0.4, top_p=0.9, top_k=4, max_tokens=30, seed=3)


def make_guessing(num_blocks: int = 64, **options: Any) -> tuple[Engine, FakeRunner]:
    """An engine with a model that sees one token only: greedily it soon repeats itself."""
    return make_engine(num_blocks, 1, **{"speculative_config": NGRAM, **options})


def of_all_kinds() -> list[Request]:
    """Whatever makes a difference to how tokens are drawn and answers end."""
    greedy = greedy_params(40)
    kinds = {
        "greedy": greedy,
        "drawn": DRAWN,
        "logprobs": replace(DRAWN, logprobs=2, seed=5),
        "stop": replace(greedy, stop_token_ids=[4]),
        "end": replace(greedy, ignore_eos=False),
        "whole context": replace(greedy, max_tokens=None),
        "prompt logprobs": replace(greedy, prompt_logprobs=1, max_tokens=5),
        "penalties": replace(DRAWN, presence_penalty=0.7, repetition_penalty=1.3),
        "bias": replace(greedy, logit_bias={2: 3.0}, max_tokens=9),
        "min tokens": replace(DRAWN, min_tokens=10, ignore_eos=False),
        "one": replace(greedy, max_tokens=1),
        "two": replace(greedy, max_tokens=2),
    }
    requests = [Request(name, PREFIX[index % 4 :], each) for index, (name, each) in enumerate(kinds.items())]
    requests += [Request(f"fork{index}", PREFIX, replace(DRAWN, seed=index), fork_of="first") for index in range(3)]
    requests[-3] = replace(requests[-3], request_id="first", fork_of=None)
    whole = Request("resumed", PREFIX[2:], greedy)
    requests.append(replace(whole, resume_token_ids=fake_answer(whole, 64, 1)[:7]))
    scored = SamplingParams(temperature=0, choices=["a", "b"])
    return [*requests, Request("choices", PREFIX, scored, ((1, 2), (1, 3, 4)))]


def told(events: Sequence[RequestEvent]) -> Any:
    """What a request is told, however many events it took."""
    last = events[-1]
    prompt_logprobs = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    logprobs = [each for event in events for each in event.logprobs]
    return token_ids(events), last.finish_reason, logprobs, prompt_logprobs, last.choice_probabilities


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"block_size": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 16},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_seqs": 2, "block_size": 4},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize("window", [None, 1, 3])
def test_answers_are_those_without_guesses(window, options):
    speculative = {**NGRAM, "disable_by_batch_size": 12}
    engine, _ = make_engine(64, window, speculative_config=speculative, **options)
    expected = run_all(make_engine(64, window, **options)[0], of_all_kinds())
    answers = run_all(engine, of_all_kinds())
    assert {name: told(events) for name, events in answers.items()} == {
        name: told(events) for name, events in expected.items()
    }
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 0
    assert all(event.new_token_ids or event.finished for events in answers.values() for event in events)


def test_what_repeats_itself_takes_a_fraction_of_the_steps():
    engine, _ = make_guessing()
    request = Request("a", PREFIX, greedy_params(40))
    events = run_all(engine, [request])["a"]
    assert token_ids(events) == fake_answer(request, engine.max_model_len, 1)
    assert max(len(event.new_token_ids) for event in events) == 5
    stats = engine.stats
    assert len(events) == stats.num_steps == 40 - stats.num_accepted_tokens
    assert stats.num_steps < 20
    assert stats.num_computed_tokens == len(PREFIX) + stats.num_steps - 1 + stats.num_draft_tokens


def test_nothing_is_guessed_beyond_the_last_token():
    for max_tokens in range(1, 20):
        engine, runner = make_guessing()
        run_all(engine, [Request("a", PREFIX, greedy_params(max_tokens))])
        # The last token itself is never computed.
        assert max(position for _, position in runner.memory.slots.values()) == len(PREFIX) + max_tokens - 2


@pytest.mark.parametrize(("num_requests", "guesses"), [(2, True), (3, False)])
def test_a_larger_batch_does_without_guesses(num_requests, guesses):
    engine, _ = make_guessing(speculative_config={**NGRAM, "disable_by_batch_size": 2})
    run_all(engine, [Request(str(index), PREFIX, greedy_params(20)) for index in range(num_requests)])
    assert (engine.stats.num_draft_tokens > 0) == guesses


@pytest.mark.parametrize("length", range(20, 26))
def test_a_stop_checker_is_told_each_token_of_the_answer_once(length):
    engine, _ = make_guessing()
    answer = fake_answer(Request("a", PREFIX, greedy_params(40)), engine.max_model_len, 1)
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return len(told) == length

    events = run_all(engine, [Request("a", PREFIX, greedy_params(40), stop_checker=stops)])["a"]
    assert events[-1].finish_reason is FinishReason.STOP
    assert len(events) < 15
    assert told == token_ids(events) == answer[:length]


def test_what_is_found_cached_afterwards_is_the_answer_and_no_guess():
    """The fake memory asserts that a slot read has the token and position that belong there."""
    engine, _ = make_engine(400, block_size=1, speculative_config=NGRAM)
    asked = [Request(str(index), PREFIX[index:], greedy_params(30)) for index in range(6)]
    answers = run_all(engine, asked)
    assert engine.stats.num_accepted_tokens > 0
    for request in asked:
        prompt = [*request.prompt_token_ids, *token_ids(answers[request.request_id])]
        after = Request("after", prompt, greedy_params(5))
        events = run_all(engine, [after])["after"]
        assert token_ids(events) == fake_answer(after, engine.max_model_len)
        # All but the answer's last token, which was not computed.
        assert events[0].num_cached_tokens == len(prompt) - 1


@pytest.mark.parametrize(("num_blocks", "guesses"), [(21, False), (23, True)])
def test_for_a_guess_nobody_gives_up_blocks(num_blocks, guesses):
    """After the prompts 5 blocks of a token each are free, or 7: for a token each, a draft of 4, and one in reserve."""
    engine, _ = make_engine(num_blocks, block_size=1, speculative_config=NGRAM)
    prompts = ([*PREFIX[:6], token, other] for token in range(1, 11) for other in range(1, 11))
    guessing = (Request("guesses", prompt, greedy_params(6)) for prompt in prompts)
    first = next(each for each in guessing if fake_answer(each, 64)[0] in each.prompt_token_ids[:-1])
    engine.add(first)
    engine.add(Request("other", [7] * 8, replace(greedy_params(2), logit_bias={2: 0.0})))
    engine.step()
    engine.step()
    assert engine.stats.num_draft_tokens == 4 * guesses
    assert engine.stats.num_preemptions == 0


def misled() -> tuple[Request, int]:
    """A request whose first guess is a token that is never said, and that token."""
    answer = fake_answer(Request("", [1], greedy_params(30)), 64, 1)
    unsaid = next(token for token in range(2, 11) if token not in answer)
    return Request("a", [answer[0], unsaid, 1], greedy_params(30)), unsaid


@pytest.mark.parametrize("trouble", ["poison", "breaks"])
def test_trouble_with_a_guess_is_not_the_requests(trouble):
    engine, runner = make_guessing()
    zeroed: list[int] = []
    runner.memory.zero = lambda blocks: zeroed.extend(blocks)  # type: ignore[method-assign]
    request, unsaid = misled()
    engine.add(request)
    events = engine.step()
    # The prompt, which has the token too, is computed.
    setattr(runner, trouble, unsaid)
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert token_ids(events) == fake_answer(request, engine.max_model_len, 1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    # A NaN of a wrong guess would be seen by all tokens after it.
    assert bool(zeroed) == (trouble == "breaks")


def test_a_guess_that_breaks_the_token_before_it_is_not_the_requests_trouble():
    """As kernels do that mask what is ahead: 0 × NaN."""
    engine, runner = make_guessing()
    request, unsaid = misled()
    execute = runner.execute
    broken_steps: list[int] = []

    def reaching_back(batch: Batch) -> Tensor:
        logits = execute(batch)
        tokens = batch.token_ids.tolist()
        if len(logits) > 1 and unsaid in tokens:
            broken_steps.append(len(tokens))
            logits[:] = torch.nan
        return logits

    runner.execute = reaching_back  # type: ignore[method-assign]
    events = run_all(engine, [request])["a"]
    assert token_ids(events) == fake_answer(request, engine.max_model_len, 1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert len(broken_steps) == 1


def test_an_answer_that_breaks_within_its_guesses_breaks_where_it_would_without():
    engine, runner = make_guessing()
    request = Request("a", PREFIX, greedy_params(40))
    answer = fake_answer(request, engine.max_model_len, 1)
    engine.add(request)
    events: list[RequestEvent] = []
    while engine.stats.num_accepted_tokens < 4:
        events += engine.step()
    num_said = len(token_ids(events))
    runner.breaks = answer[num_said + 2]
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert token_ids(events) == answer[: answer.index(runner.breaks, num_said - 1) + 1]
    assert events[-1].finish_reason is FinishReason.ERROR


def test_guesses_are_less_urgent_than_memory():
    engine, runner = make_guessing(max_num_batched_tokens=32)
    runner.fits = 3
    requests = [Request(str(index), PREFIX[index:], greedy_params(20)) for index in range(3)]
    answers = run_all(engine, requests)
    for request in requests:
        assert token_ids(answers[request.request_id]) == fake_answer(request, engine.max_model_len, 1)


def test_no_step_is_launched_ahead_where_the_next_one_may_carry_guesses():
    def is_followed(params: SamplingParams, largest_batch: int) -> bool:
        speculative = {**NGRAM, "disable_by_batch_size": largest_batch}
        engine, _ = make_guessing(async_scheduling=True, speculative_config=speculative)
        engine.add(Request("a", PREFIX, params))
        engine.add(Request("b", PREFIX, params))
        engine.step()
        return engine._in_flight is not None

    assert not is_followed(greedy_params(20), largest_batch=2)
    assert is_followed(greedy_params(20), largest_batch=1)
    # Of one or two tokens there is nothing to guess.
    assert is_followed(greedy_params(2), largest_batch=2)


@pytest.mark.parametrize("window", [None, 1, 2])
def test_a_step_ahead_the_pauses_between_guesses_are_as_long(window):
    """A step launched ahead has counted tokens that the sequence itself does not show yet."""
    counts = []
    for is_async in (False, True):
        engine, _ = make_engine(64, window, speculative_config=NGRAM, async_scheduling=is_async)
        run_all(engine, [Request("a", PREFIX, greedy_params(40))])
        counts.append((engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens, engine.stats.num_steps))
    assert counts[0] == counts[1]
