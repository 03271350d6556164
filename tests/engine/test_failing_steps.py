"""A step that raises: whose fault it was, and that nobody else notices."""

import logging
import weakref
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.device_faults import is_out_of_memory
from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.steps.step_result import LaunchedResult

from .fakes import FakeRunner, fake_answer, fake_engine, make_engine
from .running import greedy_params, run_all, token_ids

PREFIX = [token % 5 + 1 for token in range(32)]
POISON = 9
IS_ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["", "one-step-ahead"])
logging.getLogger("headrace.engine.engine").setLevel(logging.CRITICAL)


def assert_failed(events: list[RequestEvent], message: str) -> None:
    assert events[-1].finish_reason is FinishReason.ERROR
    assert message in (events[-1].error or "")
    assert "\n" not in (events[-1].error or "")


def test_a_failed_step_leaves_nothing_behind_that_could_be_found():
    engine, runner = make_engine()
    requests = [Request(str(tail), [*PREFIX, tail], greedy_params(5)) for tail in (1, 2)]
    for request in requests:
        engine.add(request)
    runner.fail_next = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    assert engine.stats.num_computed_tokens == 0
    assert engine.abort("1")
    assert engine.abort("2")
    late = Request("late", [*PREFIX, 3], greedy_params(5))
    events = run_all(engine, [late])["late"]
    assert events[-1].num_cached_tokens == 0
    assert token_ids(events) == fake_answer(late, engine.max_model_len)


@pytest.mark.parametrize("failing_step", range(1, 7))
def test_after_a_failed_step_the_next_one_goes_on_as_if_nothing_had_been(failing_step):
    engine, runner = make_engine(max_num_batched_tokens=20)
    requests = [Request(str(tail), [*PREFIX, tail], greedy_params(5)) for tail in (1, 2, 3)]
    for request in requests:
        engine.add(request)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    while engine.has_work:
        steps += 1
        if steps == failing_step:
            runner.fail_next = KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            engine.check()
        for event in engine.step():
            answers[event.request_id] += event.new_token_ids
        engine.check()
    assert steps >= failing_step
    assert answers == {request.request_id: fake_answer(request, engine.max_model_len) for request in requests}


def test_a_request_that_needs_no_step_survives_the_failure_of_one():
    engine, runner = make_engine()
    engine.add(Request("decided", PREFIX, SamplingParams(temperature=0, choices=["x"]), ((4, 5),)))
    engine.add(Request("other", PREFIX, greedy_params(1)))
    runner.fail_next = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finished = {event.request_id for event in engine.step() if event.finished}
    assert finished == {"decided", "other"}


@pytest.mark.parametrize("num_blocks", [6, 32])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("num_poisoned", [1, 2, 6])
@IS_ASYNC
def test_requests_that_fail_alone_end_with_their_error_and_the_others_go_on(
    num_poisoned, is_caching, num_blocks, is_async
):
    engine, runner = make_engine(
        num_blocks, async_scheduling=is_async, enable_prefix_caching=is_caching, max_num_batched_tokens=50
    )
    runner.poison = POISON
    harmless = replace(greedy_params(5), logit_bias={POISON: -100})
    requests = [
        Request(str(index), [*PREFIX[:18], POISON if index % 6 < num_poisoned else 6, index + 1], harmless)
        for index in range(8)
    ]
    events = run_all(engine, requests)
    for request in requests:
        if POISON in request.prompt_token_ids:
            assert_failed(events[request.request_id], "RuntimeError: poisoned row")
        else:
            assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert engine.stats.num_running == engine.stats.num_waiting == 0


@IS_ASYNC
def test_a_row_that_fails_while_it_generates_keeps_what_it_said_before(is_async):
    engine, runner = make_engine(async_scheduling=is_async)
    requests = [Request(str(first), [first, 2, 3], greedy_params(20)) for first in range(1, 6)]
    answers = {request.request_id: fake_answer(request, engine.max_model_len) for request in requests}
    runner.poison = answers["1"][7]
    events = run_all(engine, requests)
    for request_id, answer in answers.items():
        if runner.poison in answer[:-1]:
            assert_failed(events[request_id], "poisoned")
            answer = answer[: answer.index(runner.poison) + 1]
        assert token_ids(events[request_id]) == answer
    assert {events[request_id][-1].finish_reason for request_id in answers} >= {FinishReason.ERROR}


def test_an_error_that_does_not_come_back_costs_nobody_anything(monkeypatch):
    engine, _ = make_engine()
    requests = [Request(str(first), [first, 2, 3], greedy_params(5)) for first in range(1, 6)]
    errors = iter([RuntimeError("once"), torch.OutOfMemoryError("once")])

    launch = LaunchedResult.of

    def fails_twice(*arguments: Any) -> LaunchedResult:
        for error in errors:
            raise error
        return launch(*arguments)

    monkeypatch.setattr(LaunchedResult, "of", fails_twice)
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python", "torch", "driver", "cublas", "triton", "cpu"],
)
def test_whoever_ran_out_of_memory_fewer_tokens_are_tried(error, monkeypatch):
    """All requests at once, not one by one: two steps of two, where one of four failed."""
    engine, runner = make_engine()
    sizes: list[int] = []
    execute = runner.execute

    def run_out_above_two(batch: Batch) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        if len(batch.token_ids) > 2:
            raise error
        return execute(batch)

    monkeypatch.setattr(runner, "execute", run_out_above_two)
    requests = [Request(str(first), [first], greedy_params(1)) for first in range(1, 5)]
    events = run_all(engine, requests)
    assert sizes == [4, 2, 2]
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)


def test_an_error_of_another_kind_is_not_taken_for_it():
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("fits", [1, 3, 20])
@IS_ASYNC
def test_out_of_memory_shrinks_the_steps_until_they_fit(fits, is_async):
    engine, runner = make_engine(async_scheduling=is_async)
    runner.fits = fits
    requests = [Request(str(first), [*PREFIX, first], greedy_params(10)) for first in range(1, 8)]
    events = run_all(engine, requests)
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)


def test_the_tensors_of_a_failed_step_are_gone_when_the_next_is_tried(monkeypatch):
    engine, runner = make_engine()
    held: list[weakref.ref[torch.Tensor]] = []
    execute = runner.execute

    def run_out_once(batch: Batch) -> torch.Tensor:
        if not held:
            activations = torch.empty(1000)
            held.append(weakref.ref(activations))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        assert held[0]() is None
        return execute(batch)

    monkeypatch.setattr(runner, "execute", run_out_once)
    request = Request("a", PREFIX, greedy_params(3))
    assert token_ids(run_all(engine, [request])["a"]) == fake_answer(request, engine.max_model_len)


def test_after_out_of_memory_the_budget_comes_back():
    engine, runner = make_engine(max_num_batched_tokens=32)
    engine.add(Request("long", [1], greedy_params(60)))
    engine.step()
    runner.fits = 20
    engine.add(Request("wide", PREFIX[:31], greedy_params(1)))
    engine.step()
    runner.fits = None
    for _ in range(40):
        engine.step()
    before = engine.stats.num_computed_tokens
    engine.add(Request("wide", PREFIX[::-1][:31], greedy_params(1)))
    engine.step()
    assert engine.stats.num_computed_tokens - before == 32


def test_a_request_that_has_no_memory_for_one_token_fails_alone():
    engine, runner = make_engine()
    runner.fits = 0
    events = run_all(engine, [Request("a", PREFIX, greedy_params(3))])
    assert_failed(events["a"], "OutOfMemoryError")
    runner.fits = None
    run_all(engine, [Request("b", PREFIX, greedy_params(3))])


def test_logits_that_are_not_finite_end_their_row_alone_and_leave_nothing_behind():
    engine, runner = make_engine(num_blocks=8)
    runner.breaks = POISON
    requests = [Request("broken", [*PREFIX[:20], POISON], greedy_params(5)), Request("good", [5, 6], greedy_params(1))]
    events = run_all(engine, requests)
    assert_failed(events["broken"], "not finite")
    assert token_ids(events["good"]) == fake_answer(requests[1], engine.max_model_len)
    # Its three blocks and the other's, which still lie there, are zeroed before anybody gets them.
    engine.step()
    assert not any(slot for slot in runner.memory.slots.values() if slot[0] == POISON)
    runner.breaks = None
    again = run_all(engine, [Request("again", [*PREFIX[:20], POISON], greedy_params(5))])["again"]
    assert again[-1].num_cached_tokens == 0
    assert len(token_ids(again)) == 5


@pytest.mark.parametrize("num_states", [0, 4], ids=["", "with states"])
@IS_ASYNC
def test_logits_may_be_broken_by_what_others_have_left_in_the_cache(is_async, num_states):
    """So who began with blocks of others begins once more, with blocks of its own; who did not has failed."""
    config = EngineConfig(block_size=8, async_scheduling=is_async)
    runner = FakeRunner(64, 8, num_states=num_states)
    engine = fake_engine(runner, config)
    engine.expect_prefix(PREFIX, 2)
    first = Request("first", [*PREFIX, 1], greedy_params(2))
    run_all(engine, [first])
    requests = [
        Request("cached", [*PREFIX, 2], greedy_params(9)),
        Request("uncached", [5, 6, 7], greedy_params(9)),
        Request("sound", [6, 5, 4], greedy_params(9)),
    ]
    for request in requests:
        engine.add(request)
    events: dict[str, list[RequestEvent]] = {request.request_id: [] for request in requests}
    break_rows(runner, at_step=3, rows=[0, 1])
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    assert events["cached"][0].num_cached_tokens == len(PREFIX)
    assert_failed(events["uncached"], "not finite")
    for request in (requests[0], requests[2]):
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    # Nobody else finds those blocks.
    again = run_all(engine, [Request("again", [*PREFIX, 3], greedy_params(2))])["again"]
    assert token_ids(again) == fake_answer(Request("again", [*PREFIX, 3], greedy_params(2)), engine.max_model_len)
    assert engine.stats.num_available_blocks == engine.stats.num_blocks


def test_those_that_begin_once_more_take_nothing_from_each_other():
    """One of them may have been what broke the others."""
    engine, runner = make_engine()
    run_all(engine, [Request("first", [*PREFIX, 1], greedy_params(2))])
    executed: list[Batch] = []
    break_rows(runner, at_step=1, rows=[0, 1], executed=executed)
    run_all(engine, [Request(f"cached-{token}", [*PREFIX, token], greedy_params(4)) for token in (2, 3)])
    begun = [int((batch.positions == 0).sum()) for batch in executed]
    assert begun[0] == 0
    assert sum(begun) == 2


def test_who_is_broken_by_itself_is_so_once_more_and_fails():
    engine, runner = make_engine()
    run_all(engine, [Request("first", [*PREFIX, 1], greedy_params(2))])
    runner.breaks = POISON
    events = run_all(engine, [Request("broken", [*PREFIX, POISON], greedy_params(5))])["broken"]
    assert_failed(events, "not finite")
    assert events[-1].num_cached_tokens == len(PREFIX)


def break_rows(runner: FakeRunner, at_step: int, rows: list[int], executed: list[Batch] | None = None) -> None:
    """Have some rows of a step's logits be NaN: the step of this number from now on. `executed` gets all steps."""
    execute, steps = runner.execute, count(1)

    def broken(batch: Batch) -> Tensor:
        logits = execute(batch)
        if executed is not None:
            executed.append(batch)
        if next(steps) == at_step:
            logits[rows] = torch.nan
        return logits

    runner.execute = broken  # type: ignore[method-assign]


def test_a_choice_that_is_not_finite_ends_its_request():
    engine, runner = make_engine()
    runner.breaks = 2
    params = SamplingParams(temperature=0, choices=["a", "b", "c"])
    events = run_all(engine, [Request("a", [5, 6], params, ((2, 1), (2, 3), (1, 1)))])
    assert_failed(events["a"], "not finite")


def test_a_stop_checker_that_raises_ends_its_request_alone():
    engine, _ = make_engine()

    def check(token: int) -> bool:
        raise ValueError("not my token")

    requests = [
        Request("bad", PREFIX, greedy_params(5), stop_checker=check),
        Request("good", PREFIX, greedy_params(5)),
    ]
    events = run_all(engine, requests)
    assert_failed(events["bad"], "ValueError: not my token")
    assert token_ids(events["good"]) == fake_answer(requests[1], engine.max_model_len)
