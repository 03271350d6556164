"""Decodes whose columns are kept from step to step: nobody can tell by the answers, whoever joins or leaves."""

from dataclasses import replace

import pytest

from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams

from ..fakes import fake_answer, make_engine
from ..running import greedy_params, run_all, token_ids


def test_rows_are_kept_until_somebody_joins_or_leaves():
    engine, _ = make_engine()
    engine.add(Request("a", [1, 2, 3], greedy_params(9)))
    engine.add(Request("b", [4, 5, 6], greedy_params(20)))
    engine.step()
    kept = []
    for added in (None, None, None, Request("c", [7, 8], greedy_params(20)), None, None):
        if added is not None:
            engine.add(added)
        engine.step()
        engine.check()
        kept.append(engine._scheduler.decodes)
    assert kept[0] is kept[1] is kept[2] is not None
    assert kept[3] is None
    assert kept[4] is kept[5] is not None
    while len(engine.step()) == 3:
        assert engine._scheduler.decodes in (kept[5], None)
    assert engine._scheduler.decodes is not kept[5]


def test_each_row_ends_where_it_would_alone_and_tells_what_it_was_asked_for(is_async):
    drawn = SamplingParams(temperature=1.5, seed=7, max_tokens=30, ignore_eos=True)
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return len(told) == 18

    requests = [
        Request("length", [1, 2, 3], greedy_params(23)),
        Request("end token", [4, 5, 6], SamplingParams(temperature=2.0, seed=3, max_tokens=40)),
        Request("stop token", [2, 2], replace(drawn, stop_token_ids=[5, 9])),
        Request("drawn", [7, 8, 9, 1], drawn),
        Request("logprobs", [9, 9, 1], replace(greedy_params(20), logprobs=2)),
        Request("checked", [3, 1], greedy_params(40), stop_checker=stops),
    ]
    engine, _ = make_engine(num_blocks=64, async_scheduling=is_async)
    events: dict[str, list[RequestEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    checked = token_ids(events.pop("checked"))
    assert checked == told == fake_answer(requests[-1], engine.max_model_len)[:18]
    for request in requests[:-1]:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert events["length"][-1].finish_reason is FinishReason.LENGTH
    assert all(event.finish_reason is None for event in events["length"][:-1])
    for event in events["logprobs"]:
        assert [next(iter(entry)) for entry in event.logprobs] == list(event.new_token_ids)


def test_blocks_that_decodes_fill_are_found_by_others(is_async):
    engine, _ = make_engine(async_scheduling=is_async)
    first = Request("first", [1, 2, 3], greedy_params(30))
    answer = token_ids(run_all(engine, [first])["first"])
    again = Request("again", [1, 2, 3, *answer[:28]], greedy_params(2))
    assert run_all(engine, [again])["again"][-1].num_cached_tokens == 24


def test_without_the_prefix_cache_nothing_is_hashed(is_async):
    engine, _ = make_engine(async_scheduling=is_async, enable_prefix_caching=False)
    engine.add(Request("long", [1, 2, 3] * 4, greedy_params(30)))
    num_tokens = 0
    while engine.has_work:
        num_tokens += len(engine.step())
        engine.check()
        assert not any(sequence.block_hashes for sequence in engine._scheduler.running)
    assert num_tokens == 30


def test_as_much_is_guessed_whether_rows_are_kept_or_not(is_async):
    guessed = []
    for is_kept in (True, False):
        config = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
        engine, _ = make_engine(num_blocks=64, async_scheduling=is_async, speculative_config=config)
        for index in range(3):
            engine.add(Request(str(index), [1 + index, 2, 7 - index], greedy_params(40)))
        num_kept = 0
        while engine.has_work:
            engine.step()
            num_kept += engine._scheduler.decodes is not None
            if not is_kept:
                engine._scheduler.part_decodes()
        assert num_kept > 3
        guessed.append(engine.stats.num_draft_tokens)
    assert guessed[0] == guessed[1] > 0


@pytest.fixture(params=[False, True], ids=["one step at a time", "one step ahead"])
def is_async(request):
    return request.param
