"""One step ahead: the next batch is launched before this one's tokens are read, and nobody can tell by the answers."""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from headrace.engine.engine import Engine
from headrace.engine.kv_cache.block_hashes import hash_blocks
from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.steps.step_result import LaunchedResult, StepResult

from .fakes import FakeRunner, fake_answer, make_engine
from .running import greedy_params, run_all, token_ids

PREFIX = [token % 5 + 1 for token in range(32)]


def make_async(**options: Any) -> tuple[Engine, FakeRunner, list[int]]:
    """An engine, its runner, and how many tokens each batch launched so far has."""
    engine, runner = make_engine(**{"async_scheduling": True, **options})
    launched: list[int] = []
    execute = runner.execute

    def counted(batch: Any) -> Any:
        launched.append(len(batch.token_ids))
        return execute(batch)

    runner.execute = counted  # type: ignore[method-assign]
    return engine, runner, launched


def test_the_next_step_is_launched_before_this_one_is_read():
    engine, _, launched = make_async()
    engine.add(Request("a", PREFIX[:5], greedy_params(4)))
    assert len(engine.step()) == 1
    assert launched == [5, 1]
    assert len(engine.step()) == 1
    assert launched == [5, 1, 1]


def test_what_is_sure_to_be_the_last_token_is_not_computed():
    engine, _, launched = make_async()
    run_all(engine, [Request("a", PREFIX[:5], greedy_params(4))])
    assert launched == [5, 1, 1, 1]


def test_beside_a_cpu_it_is_off_unless_asked_for():
    engine, _, launched = make_async(async_scheduling=None)
    engine.add(Request("a", PREFIX[:5], greedy_params(4)))
    engine.step()
    assert launched == [5]


@pytest.mark.parametrize(
    "params",
    [
        replace(greedy_params(4), presence_penalty=1.0),
        replace(greedy_params(4), logit_bias={3: 2.0}),
        replace(greedy_params(4), min_tokens=2),
    ],
    ids=["penalty", "bias", "min-tokens"],
)
def test_nothing_is_launched_ahead_of_a_token_that_the_next_one_depends_on(params):
    engine, _, launched = make_async()
    request = Request("a", PREFIX[:5], params)
    engine.add(request)
    engine.step()
    assert launched == [5]
    engine.abort("a")
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, engine.max_model_len)


def mixed_requests() -> list[Request]:
    """Greedy and drawn, with log-probabilities, shared prompts, ends by a stop token and by length."""
    drawn = SamplingParams(temperature=0.9, top_p=0.9, top_k=5, max_tokens=12, seed=3, logprobs=2)
    return [
        *(Request(f"greedy{index}", PREFIX[index:], greedy_params(5 + index)) for index in range(3)),
        *(Request(f"drawn{index}", PREFIX[: 9 + index], replace(drawn, seed=index)) for index in range(4)),
        Request("stopped", PREFIX[3:20], SamplingParams(temperature=0, stop_token_ids=[2, 4, 6])),
        Request("again", PREFIX[3:20], SamplingParams(temperature=1.5, min_p=0.05, seed=9)),
        Request("fork", PREFIX[3:20], SamplingParams(temperature=1.5, min_p=0.05, seed=10), fork_of="again"),
        Request("biased", PREFIX[7:], replace(greedy_params(6), frequency_penalty=0.5)),
    ]


@pytest.mark.parametrize("num_blocks", [9, 64])
def test_answers_are_the_same(num_blocks):
    answers = []
    for is_async in (False, True):
        engine, _ = make_engine(num_blocks, async_scheduling=is_async, max_num_batched_tokens=40, max_num_seqs=6)
        events = run_all(engine, mixed_requests())
        answers.append(
            {name: [(e.new_token_ids, e.logprobs, e.finish_reason) for e in events[name]] for name in events}
        )
    assert answers[0] == answers[1]


def test_what_was_computed_for_an_answer_that_has_ended_is_thrown_away():
    engine, _, launched = make_async()
    whole = Request("a", PREFIX[:5], greedy_params(20))
    answer = fake_answer(whole, engine.max_model_len)
    stop = answer[4]
    request = replace(whole, params=replace(whole.params, stop_token_ids=[stop]))
    events = run_all(engine, [request])["a"]
    length = answer.index(stop) + 1
    assert token_ids(events) == answer[:length]
    # Its prompt, each token but the last, and the last one in vain.
    assert launched == [5, *[1] * length]
    assert engine.stats.num_available_blocks == engine.stats.num_blocks


def test_a_block_is_not_found_before_its_last_token_is_known():
    engine, runner, _ = make_async(block_size=4)
    request = Request("a", PREFIX[:3], greedy_params(8))
    first, *_ = fake_answer(request, engine.max_model_len)
    engine.add(request)
    found = engine._cache._block_of
    num_found: list[int] = []
    execute = runner.execute

    def watched(batch: Any) -> Any:
        num_found.append(len(found))
        return execute(batch)

    runner.execute = watched  # type: ignore[method-assign]
    engine.step()
    # The step in flight fills the block, with the token that has just been read.
    assert num_found == [0, 0]
    assert list(found) == hash_blocks([*PREFIX[:3], first], 4)
    engine.abort("a")
    later = run_all(engine, [Request("b", [*PREFIX[:3], first, 5], greedy_params(1))])["b"]
    assert later[-1].num_cached_tokens == 4


def test_aborted_while_its_step_is_in_flight():
    engine, _, _ = make_async(max_num_seqs=2)
    requests = [Request(str(index), PREFIX[index : index + 9], greedy_params(9)) for index in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.abort("0")
    engine.check()
    # A new one of the same name gets nothing of the old one's.
    again = replace(requests[0], prompt_token_ids=PREFIX[4:10])
    engine.add(again)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for event in engine.step() if event.request_id == "0" for token in event.new_token_ids]
        engine.check()
    assert tokens == fake_answer(again, engine.max_model_len)


def test_whose_prompt_is_shared_is_aborted_while_it_is_in_flight():
    engine, _, _ = make_async(max_num_batched_tokens=8)
    drawn = SamplingParams(temperature=1, max_tokens=4, ignore_eos=True)
    leader, *followers = (
        Request(str(index), PREFIX[:12], replace(drawn, seed=index), fork_of="0" if index else None)
        for index in range(3)
    )
    engine.add(leader)
    for follower in followers:
        engine.add(follower)
    # The prompt's second chunk, from which all three draw, is in flight now.
    assert engine.step() == []
    assert engine.abort("0")
    events: dict[str, list[RequestEvent]] = {"1": [], "2": []}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    for follower in followers:
        assert token_ids(events[follower.request_id]) == fake_answer(follower, engine.max_model_len)


def test_what_breaks_for_an_aborted_request_is_no_fault_of_its_successors():
    engine, runner, launched = make_async()
    request, again = (Request("a", PREFIX[start : start + 9], greedy_params(3)) for start in (0, 1))
    runner.breaks = fake_answer(request, engine.max_model_len)[0]
    assert runner.breaks not in [PREFIX[9], *fake_answer(again, engine.max_model_len)]
    engine.add(request)
    engine.step()
    # What comes after the token that breaks is in flight.
    assert launched == [9, 1]
    engine.abort("a")
    assert token_ids(run_all(engine, [again])["a"]) == fake_answer(again, engine.max_model_len)


def test_nothing_is_launched_before_scores_are_read():
    """A graph's logits are overwritten by the next one's."""
    engine, _, launched = make_async()
    choices = SamplingParams(temperature=0, choices=["a", "b"])
    engine.add(Request("choice", PREFIX[:4], choices, ((1, 2), (2, 1))))
    engine.add(Request("text", PREFIX[4:9], greedy_params(4)))
    engine.step()
    assert launched == [9]


def test_what_was_in_flight_when_all_had_ended_does_not_hold_up_what_comes_next():
    engine, _, _ = make_async()
    whole = Request("a", PREFIX[:5], greedy_params(20))
    stop = fake_answer(whole, engine.max_model_len)[4]
    run_all(engine, [replace(whole, params=replace(whole.params, stop_token_ids=[stop]))])
    engine.add(Request("b", PREFIX[5:9], greedy_params(4)))
    assert len(engine.step()) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_ahead_that_fails_costs_nobody_anything(error):
    engine, runner, _ = make_async(max_num_batched_tokens=20)
    requests = [Request(str(tail), [*PREFIX, tail], greedy_params(9)) for tail in (1, 2, 3)]
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    events = engine.step()
    num_failures = 0
    while engine.has_work:
        # The step in flight is read, and the one after it fails.
        runner.fail_next = error
        with suppress(KeyboardInterrupt):
            events += engine.step()
        num_failures += runner.fail_next is None
        runner.fail_next = None
        engine.check()
        events += engine.step()
        engine.check()
    assert num_failures > 3
    for event in events:
        answers[event.request_id] += event.new_token_ids
    assert answers == {request.request_id: fake_answer(request, engine.max_model_len) for request in requests}


def test_an_interrupted_look_ahead_leaves_the_step_before_it_to_be_read():
    engine, runner, launched = make_async()
    request = Request("a", PREFIX[:5], greedy_params(4))
    engine.add(request)
    execute = runner.execute

    def interrupting(batch: Any) -> Any:
        # The first of all is launched and not yet read.
        if len(launched) == 1:
            runner.fail_next = KeyboardInterrupt
        return execute(batch)

    runner.execute = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    runner.execute = execute  # type: ignore[method-assign]
    tokens: list[int] = []
    while engine.has_work:
        tokens += token_ids(engine.step())
        engine.check()
    assert tokens == fake_answer(request, engine.max_model_len)
    # Its prompt is computed once, and so is each token; what was interrupted is counted twice.
    assert launched == [5, 1, 1, 1, 1]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_cannot_be_read_costs_nobody_anything(error, monkeypatch):
    engine, _, _ = make_async()
    requests = [Request(str(index), PREFIX[index : index + 9], greedy_params(6)) for index in range(3)]
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    read, num_reads = LaunchedResult.read, count()

    def failing(result: LaunchedResult) -> StepResult:
        if next(num_reads) == 2:
            raise error("asked for by the test")
        return read(result)

    monkeypatch.setattr(LaunchedResult, "read", failing)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            for event in engine.step():
                answers[event.request_id] += event.new_token_ids
        engine.check()
    assert next(num_reads) > 6
    assert answers == {request.request_id: fake_answer(request, engine.max_model_len) for request in requests}


def test_only_a_step_that_is_not_ahead_preempts():
    engine, _, _ = make_async(num_blocks=5, max_num_batched_tokens=9, enable_prefix_caching=False)
    requests = [Request("a", PREFIX[:12], greedy_params(20)), Request("b", PREFIX[5:22], greedy_params(20))]
    events = run_all(engine, requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)


def test_logits_that_are_not_finite_show_when_the_next_step_is_under_way():
    engine, runner, _ = make_async(num_blocks=8)
    request = Request("a", PREFIX[:9], greedy_params(20))
    good = Request("good", PREFIX[9:20], replace(greedy_params(9), temperature=0.8, seed=1))
    answer = fake_answer(request, engine.max_model_len)
    others = {PREFIX[8], PREFIX[19], *fake_answer(good, engine.max_model_len)}
    runner.breaks = next(token for token in answer if token not in others)
    events = run_all(engine, [request, good])
    assert events["a"][-1].finish_reason is FinishReason.ERROR
    assert token_ids(events["a"]) == answer[: answer.index(runner.breaks) + 1]
    assert token_ids(events["good"]) == fake_answer(good, engine.max_model_len)
    engine.step()
    assert engine.stats.num_available_blocks == engine.stats.num_blocks
