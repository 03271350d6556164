"""A request that is told of at its end has the same answer, and can be watched from any step on."""

from array import array
from dataclasses import replace

import pytest

from headrace.engine.request import FinishReason, Request, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.served_request import ServedRequest

from .fakes import fake_answer, make_engine
from .running import greedy_params, run_all, token_ids

FINAL_ONLY = RequestOutputKind.FINAL_ONLY
DRAWN = SamplingParams(temperature=1.5, seed=7, max_tokens=30, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["one step at a time", "one step ahead"])
def is_async(request):
    return request.param


def stop_after(number: int):
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return len(told) == number

    return stops


def requests() -> list[Request]:
    return [
        Request("length", [1, 2, 3], greedy_params(23)),
        Request("one", [1, 2, 3, 4, 5], greedy_params(1)),
        Request("end token", [4, 5, 6], SamplingParams(temperature=2.0, seed=3, max_tokens=40)),
        Request("stop token", [2, 2], replace(DRAWN, stop_token_ids=[5, 9])),
        Request("penalties", [2, 3], replace(DRAWN, presence_penalty=1.0)),
        Request("logprobs", [9, 9, 1], replace(greedy_params(20), logprobs=2)),
        Request("prompt", [9, 8, 1], replace(greedy_params(20), logprobs=1, prompt_logprobs=1)),
        Request("resumed", [3, 1, 2], greedy_params(20), resume_token_ids=fake_answer_of([3, 1, 2], 20)[:6]),
        Request("choices", [3, 1, 2], SamplingParams(temperature=0, choices=("a", "b c")), ((1,), (2, 3))),
        Request("forked", [1, 2, 3], DRAWN, fork_of="length"),
    ]


def fake_answer_of(prompt: list[int], max_tokens: int) -> list[int]:
    engine, _ = make_engine(num_blocks=64)
    return fake_answer(Request("", prompt, greedy_params(max_tokens)), engine.max_model_len)


def test_the_one_event_says_what_all_events_would_have_said(is_async):
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    told = run_all(engine, requests())
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    # Some of either kind at a time.
    kept = [replace(each, output_kind=FINAL_ONLY) if index % 3 else each for index, each in enumerate(requests())]
    finals = run_all(engine, kept)
    for index, request in enumerate(requests()):
        events, final = told[request.request_id], finals[request.request_id]
        if index % 3:
            assert len(final) == 1
        assert token_ids(final) == token_ids(events)
        assert [each for event in final for each in event.logprobs] == [
            each for event in events for each in event.logprobs
        ]
        assert final[0].prompt_logprobs == events[0].prompt_logprobs
        assert final[-1][2:6] == events[-1][2:6]
    # A choice is not generated.
    assert engine.num_generated_tokens == sum(len(token_ids(told[name])) for name in told if name != "choices")


def test_a_stop_checker_is_told_of_each_token(is_async):
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    asked = [
        Request(str(number), [3, number], greedy_params(40), stop_checker=stop_after(number), output_kind=FINAL_ONLY)
        for number in range(3, 9)
    ]
    for number, events in zip(range(3, 9), run_all(engine, asked).values(), strict=True):
        assert len(token_ids(events)) == number
        assert [event.finish_reason for event in events] == [FinishReason.STOP]


def test_guesses_change_nothing_of_it():
    config = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    engine, _ = make_engine(num_blocks=64, speculative_config=config)
    kept = [replace(each, output_kind=FINAL_ONLY) for each in requests()]
    engine_without, _ = make_engine(num_blocks=64)
    told = run_all(engine_without, requests())
    for request_id, events in run_all(engine, kept).items():
        assert len(events) == 1
        assert token_ids(events) == token_ids(told[request_id])
    assert engine.stats.num_draft_tokens


@pytest.mark.parametrize("after", [0, 1, 5, 12])
def test_a_request_is_watched_from_any_step_on(is_async, after):
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    asked = [Request(str(index), [1 + index, 2], replace(DRAWN, logprobs=1 if index else None)) for index in range(4)]
    for request in asked:
        engine.add(replace(request, output_kind=FINAL_ONLY))
    for _ in range(after):
        assert not engine.step()
    watched = {request_id: engine.watch(request_id) for request_id in ("0", "1", "gone")}
    assert watched["gone"] is None
    assert engine.watch("0") is None, "nothing is told twice"
    events = {request_id: [event] if event else [] for request_id, event in watched.items()}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check()
    for request in asked:
        told = events[request.request_id]
        assert token_ids(told) == fake_answer(request, engine.max_model_len)
        assert len(told) > 10 if request.request_id in watched else len(told) == 1
        if request.params.logprobs is not None:
            assert [next(iter(each)) for event in told for each in event.logprobs] == token_ids(told)


def test_what_a_prompt_is_likely_to_be_is_told_with_what_was_not_told_so_far(is_async):
    request = Request("r", [9, 8, 1, 4], replace(greedy_params(20), logprobs=1, prompt_logprobs=1))
    engine, _ = make_engine(num_blocks=64)
    told = run_all(engine, [request])["r"]
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    engine.add(replace(request, output_kind=FINAL_ONLY))
    for _ in range(6):
        engine.step()
    before = engine.watch("r")
    assert before is not None
    assert len(before.prompt_logprobs or ()) == 4
    assert before.prompt_logprobs == told[0].prompt_logprobs


def test_what_no_event_has_told_can_be_looked_at(is_async):
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    request = Request("r", [1, 2], replace(DRAWN, logprobs=0), output_kind=FINAL_ONLY)
    engine.add(request)
    for _ in range(9):
        engine.step()
    token_ids, logprobs = engine.untold("r")
    assert len(token_ids) >= 8
    assert list(token_ids) == fake_answer(request, engine.max_model_len)[: len(token_ids)]
    assert [next(iter(each)) for each in logprobs] == list(token_ids)
    engine.watch("r")
    assert not engine.untold("r")[0]
    engine.abort("r")
    assert not engine.untold("r")[0]


def test_what_another_thread_looks_at_has_no_log_probabilities_without_tokens(monkeypatch):
    """The engine goes on between any two things that the other thread looks at."""
    engine, _ = make_engine(num_blocks=64)
    engine.add(Request("r", [1, 2], replace(DRAWN, logprobs=0), output_kind=FINAL_ONLY))
    engine.step()
    read = ServedRequest.untold_token_ids

    def amid_steps(served: ServedRequest) -> "array[int]":
        engine.step()
        token_ids = read(served)
        engine.step()
        return token_ids

    monkeypatch.setattr(ServedRequest, "untold_token_ids", amid_steps)
    token_ids, logprobs = engine.untold("r")
    assert token_ids
    assert [next(iter(each)) for each in logprobs] == list(token_ids[: len(logprobs)])


def test_of_a_request_that_somebody_begins_to_watch_meanwhile_nothing_is_seen_twice(monkeypatch):
    engine, _ = make_engine(num_blocks=64)
    engine.add(Request("r", [1, 2], replace(DRAWN, logprobs=0), output_kind=FINAL_ONLY))
    engine.step()
    read = ServedRequest.untold_token_ids

    def after_watch(served: ServedRequest) -> "array[int]":
        monkeypatch.undo()
        engine.watch("r")
        return read(served)

    monkeypatch.setattr(ServedRequest, "untold_token_ids", after_watch)
    assert [len(each) for each in engine.untold("r")] == [0, 0]


def test_a_request_that_fails_brings_what_it_had():
    said: list[int] = []

    def raises(token: int) -> bool:
        said.append(token)
        if len(said) < 4:
            return False
        raise ValueError(f"not {token}")

    engine, _ = make_engine(num_blocks=64)
    params = replace(DRAWN, logprobs=0)
    (event,) = run_all(engine, [Request("r", [1, 2], params, stop_checker=raises, output_kind=FINAL_ONLY)])["r"]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error is not None
    # As many as have their log-probabilities.
    assert list(event.new_token_ids) == [next(iter(each)) for each in event.logprobs] == said[:3]


@pytest.mark.parametrize("output_kind", RequestOutputKind)
def test_a_request_that_fails_tells_of_its_prompt_what_others_do(output_kind):
    """Whether its tokens were told of before it fails or with that."""
    engine, runner = make_engine(num_blocks=64)
    prompt = [token % 5 + 1 for token in range(20)]
    run_all(engine, [Request("before", prompt, replace(DRAWN, max_tokens=1))])
    params = replace(DRAWN, max_tokens=4, ignore_eos=True)
    for name, asked in (("prompt", replace(params, prompt_logprobs=1)), ("cached", params)):
        engine.add(Request(name, prompt, asked, output_kind=output_kind))
        events = engine.step()
        runner.fail_next = RuntimeError
        events += engine.step()
        assert events[-1].finish_reason is FinishReason.ERROR
        assert [len(event.new_token_ids) for event in events if event.new_token_ids] == [1]
        if name == "prompt":
            [told] = [event for event in events if event.prompt_logprobs is not None]
            assert told.new_token_ids
            assert told.prompt_logprobs is not None
            assert len(told.prompt_logprobs) == len(prompt)
        assert events[-1].num_cached_tokens == (0 if name == "prompt" else 16)
