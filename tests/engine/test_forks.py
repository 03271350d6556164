"""Requests with the same prompt compute it once, and are on their own after it."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams

from .fakes import fake_answer, make_engine
from .running import run_all, token_ids

PROMPT = [token % 10 + 1 for token in range(21)]
DRAWN = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)


def samples(count: int, prompt: list[int] = PROMPT, **options: Any) -> list[Request]:
    return [
        Request(str(index), prompt, replace(DRAWN, seed=index, **options), fork_of="0" if index else None)
        for index in range(count)
    ]


def assert_right(events: dict[str, list[RequestEvent]], requests: list[Request], max_model_len: int) -> None:
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, max_model_len)


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("length", [16, 17, 21])
def test_the_prompt_is_computed_once(length, is_caching):
    engine, _ = make_engine(enable_prefix_caching=is_caching)
    requests = samples(4, PROMPT[:length])
    events = run_all(engine, requests)
    assert_right(events, requests, engine.max_model_len)
    assert engine.stats.num_computed_tokens == length + 4 * 11
    assert [events[str(index)][-1].num_cached_tokens for index in range(4)] == [0, length, length, length]
    # Their first tokens come from the same logits, in the same step.
    assert engine.stats.num_steps == 12


def test_full_blocks_are_shared_and_the_last_one_copied():
    """Two full blocks of the prompt, and for each sample one block that begins with the prompt's last tokens."""
    engine, _ = make_engine(num_blocks=5)
    requests = samples(3, max_tokens=3)
    events = run_all(engine, requests)
    assert_right(events, requests, engine.max_model_len)
    assert engine.stats.num_preemptions == 0
    assert engine.stats.num_computed_tokens == len(PROMPT) + 3 * 2


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(5, 8), (8, 8), (32, 1), (32, 2)])
def test_without_seats_or_blocks_they_run_one_after_the_other(num_blocks, max_num_seqs, is_caching):
    engine, _ = make_engine(num_blocks, max_num_seqs=max_num_seqs, enable_prefix_caching=is_caching)
    requests = samples(5)
    assert_right(run_all(engine, requests), requests, engine.max_model_len)


@pytest.mark.parametrize("aborted", ["0", "1", "2"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_one_can_be_aborted_at_any_time(aborted, num_steps):
    """Before the prompt is computed too, be it the one that computes it or one that waits."""
    engine, _ = make_engine(max_num_batched_tokens=9)
    requests = samples(3)
    for request in requests:
        engine.add(request)
    events: dict[str, list[RequestEvent]] = {request.request_id: [] for request in requests}

    def step() -> None:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()

    for _ in range(num_steps):
        step()
    assert engine.abort(aborted)
    engine.check()
    while engine.has_work:
        step()
    assert_right(events, [request for request in requests if request.request_id != aborted], engine.max_model_len)


def test_when_the_one_that_computes_the_prompt_fails_another_does():
    engine, runner = make_engine()
    runner.breaks = PROMPT[-1]
    events = run_all(engine, samples(3))
    assert {each[-1].finish_reason for each in events.values()} == {FinishReason.ERROR}


@pytest.mark.parametrize("other", ["unknown", "done"])
def test_a_fork_of_what_is_not_here_computes_its_prompt_itself(other):
    engine, _ = make_engine()
    run_all(engine, [Request("done", PROMPT, DRAWN)])
    request = Request("late", PROMPT, replace(DRAWN, seed=1), fork_of=other)
    assert_right(run_all(engine, [request]), [request], engine.max_model_len)


def test_a_fork_of_what_has_begun_to_answer_computes_its_prompt_itself():
    engine, _ = make_engine()
    first, second = samples(2)
    engine.add(first)
    engine.step()
    engine.add(second)
    events = [event for event in engine.step() if event.request_id == "1"]
    while engine.has_work:
        events += [event for event in engine.step() if event.request_id == "1"]
    assert token_ids(events) == fake_answer(second, engine.max_model_len)


def test_a_fork_with_another_prompt_is_refused():
    engine, _ = make_engine()
    engine.add(Request("0", PROMPT))
    with pytest.raises(InvalidRequestError, match="fork_of names '0', which has another prompt"):
        engine.add(Request("1", PROMPT[1:], fork_of="0"))
