"""The engine's thread: each request gets its one outcome, whatever happens to its neighbours."""

import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue

import pytest

from headrace.engine.request import Request, RequestEvent, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.jobs.hosting import engine_host
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Answer, EngineFailure, Outcome, Refusal

from ...engine.fakes import CONTEXT, VOCAB_SIZE, fake_answer
from ..answers import GatedRunner, hosted, take
from ..conftest import wait_until

PARAMS = SamplingParams(temperature=0.8, max_tokens=10, seed=3, ignore_eos=True)


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
def host(runner) -> Iterator[EngineHost]:
    with hosted(runner) as (host, _):
        yield host


@pytest.fixture
def outcomes() -> "SimpleQueue[Outcome]":
    return SimpleQueue()


def request(request_id: str, *prompt: int, params: SamplingParams = PARAMS) -> Request:
    return Request(request_id, prompt or (1, 2, 3), params)


def assert_answered(outcome: Outcome, asked: Request) -> None:
    assert isinstance(outcome, Answer)
    assert list(outcome.token_ids) == fake_answer(asked, CONTEXT)


def test_many_threads_get_what_each_would_have_got_alone(host):
    requests = {
        thread: [
            request(f"{thread}/{number}", *[1 + (thread + number + i) % 10 for i in range(1 + number % 5)])
            for number in range(10)
        ]
        for thread in range(8)
    }
    queues: dict[int, SimpleQueue[Outcome]] = {thread: SimpleQueue() for thread in requests}

    def submit(thread: int) -> None:
        for start in range(0, 10, 5):
            host.submit(requests[thread][start : start + 5], queues[thread].put)

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in requests]
    for each in threads:
        each.start()
    for thread, asked in requests.items():
        answers = take(queues[thread], 10)
        for one in asked:
            assert_answered(answers[one.request_id], one)


def test_where_its_thread_is_changes_with_every_step_and_request(host, runner, outcomes):
    assert host.place is None
    runner.close()
    host.submit([request("a")], outcomes.put)
    runner.wait_until_reached()
    first = host.place
    assert first is not None
    assert host.place == first
    assert host.words() == "the engine, at step 1 with 1 sequences running and 0 waiting,"
    runner.permit(1)
    runner.wait_until_reached()
    assert host.place not in (None, first)
    runner.open()
    take(outcomes, 1)
    wait_until(lambda: host.place is None, "it is at rest")


def test_steps_that_fail_and_are_tried_apart_get_on(host, runner, outcomes):
    runner.close()
    host.submit([request("a"), request("b")], outcomes.put)
    runner.wait_until_reached()
    whole = host.place
    runner.fail = RuntimeError("asked for by the test")
    runner.permit(1)
    runner.wait_until_reached()
    assert host.place != whole
    runner.open()
    take(outcomes, 2)


def test_a_choice_comes_with_all_probabilities(host, outcomes):
    params = SamplingParams(temperature=0, choices=("a", "b c"))
    host.submit([Request("r", (1, 2), params, ((1,), (2, 3)))], outcomes.put)
    answer = take(outcomes, 1)["r"]
    assert isinstance(answer, Answer)
    assert answer.choice_index is not None
    assert answer.choice_probabilities is not None
    assert sum(answer.choice_probabilities) == pytest.approx(1)
    assert answer.choice_index == answer.choice_probabilities.index(max(answer.choice_probabilities))


def test_an_aborted_request_is_never_heard_of_and_its_neighbours_are(runner, host, outcomes):
    runner.close()
    asked = [request(str(number)) for number in range(6)]
    host.submit(asked, outcomes.put)
    runner.wait_until_reached()
    host.abort(["0", "3", "unknown"])
    runner.open()
    assert take(outcomes, 4).keys() == {"1", "2", "4", "5"}
    host.submit([request("0")], outcomes.put)
    assert take(outcomes, 1).keys() == {"0"}


def test_aborting_frees_the_memory(runner, outcomes):
    with hosted(runner) as (host, engine):
        runner.close()
        host.submit([request(str(number)) for number in range(6)], outcomes.put)
        runner.wait_until_reached()
        host.abort(map(str, range(6)))
        host.submit([request("last")], outcomes.put)
        runner.open()
        assert take(outcomes, 1).keys() == {"last"}
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.has_work) == (0, 0, False)


def test_a_step_that_raises_fails_all_and_the_next_requests_run(runner, host, outcomes):
    runner.close()
    asked = [request(str(number)) for number in range(10)]
    host.submit(asked, outcomes.put)
    runner.permit(2)
    for _ in range(3):
        runner.wait_until_reached()
    runner.fail = RuntimeError("out of\n  memory")
    runner.open()
    failures = take(outcomes, 10)
    assert {type(outcome) for outcome in failures.values()} == {EngineFailure}
    assert {outcome.error for outcome in failures.values() if isinstance(outcome, EngineFailure)} == {
        "RuntimeError: out of memory"
    }
    runner.fail = None
    host.submit(asked, outcomes.put)
    answers = take(outcomes, 10)
    for one in asked:
        assert_answered(answers[one.request_id], one)


@pytest.mark.parametrize("output_kind", RequestOutputKind)
def test_a_row_that_makes_every_step_raise_is_refused_and_its_neighbours_are_answered(
    runner, host, outcomes, output_kind
):
    runner.poison = 10
    harmless = replace(PARAMS, logit_bias={10: -100})
    good = [request(str(number), number + 1, params=harmless) for number in range(6)]
    runner.close()
    asked = [*good[:3], request("bad", 1, 10), *good[3:]]
    host.submit([replace(each, output_kind=output_kind) for each in asked], outcomes.put)
    runner.open()
    heard = take(outcomes, 7)
    refusal = heard.pop("bad")
    assert isinstance(refusal, Refusal)
    assert refusal.error == "RuntimeError: poisoned row"
    for one in good:
        assert_answered(heard[one.request_id], one)


def test_rows_that_are_told_of_at_their_end_can_be_watched_and_looked_at_before(runner, host, outcomes):
    params = replace(PARAMS, logprobs=0)
    watched, kept = (
        replace(request(name, params=params), output_kind=RequestOutputKind.FINAL_ONLY, resume_token_ids=begun)
        for name, begun in (("watched", ()), ("kept", tuple(fake_answer(request("", params=params), CONTEXT)[:2])))
    )
    runner.close()
    host.submit_rows([watched, kept], lambda some: [outcomes.put(each) for each in some], {"kept": ({}, {})})
    runner.permit(5)
    for _ in range(6):
        runner.wait_until_reached()
    # With the step at the gate five are over, one of them perhaps not read yet.
    for name, number in (("watched", 0), ("watched", 2), ("kept", 0), ("kept", 3)):
        found, logprobs = host.tokens_after(name, number, 1, with_logprobs=True)
        known = 2 if name == "kept" else 0
        assert len(found) == len(logprobs) >= known + 4 - number
        assert found == fake_answer(watched, CONTEXT)[number : number + len(found)]
        assert host.tokens_after(name, number, 11) == ([], [])
    events: SimpleQueue[RequestEvent] = SimpleQueue()
    host.watch("watched", lambda outcome: None, events.put)
    runner.open()
    answers = take(outcomes, 2)
    assert_answered(answers["watched"], watched)
    assert_answered(answers["kept"], replace(kept, resume_token_ids=()))
    seen = [events.get_nowait() for _ in range(events.qsize())]
    assert len(seen) > 3
    assert tuple(token for event in seen for token in event.new_token_ids) == answers["watched"].token_ids
    assert tuple(each for event in seen for each in event.logprobs) == answers["watched"].logprobs


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (Request("bad", (), PARAMS), "prompt is empty"),
        (Request("bad", (VOCAB_SIZE,), PARAMS), f"token id {VOCAB_SIZE} is outside the vocabulary"),
        (Request("bad", array("i", [1, VOCAB_SIZE]), PARAMS), f"token id {VOCAB_SIZE} is outside the vocabulary"),
        (Request("bad", array("i", [1, -1]), PARAMS), "token id -1 is outside the vocabulary"),
        (Request("bad", array("q", [1, -1]), PARAMS), "token id -1 is outside the vocabulary"),
        (Request("bad", array("f", [1.0]), PARAMS), "token ids must be whole numbers"),  # type: ignore[arg-type]
        (Request("bad", (1,) * CONTEXT, PARAMS), f"prompt has {CONTEXT} tokens"),
        (Request("bad", (1,), replace(PARAMS, choices=("a",)), ((),)), "choices must be"),
    ],
    ids=["empty", "unknown token", "in an array", "negative", "in a wide array", "a float", "too long", "empty choice"],
)
def test_a_request_that_can_never_run_is_refused_and_its_neighbours_run(host, outcomes, bad, problem):
    good = request("good")
    host.submit([bad, good], outcomes.put)
    heard = take(outcomes, 2)
    assert isinstance(heard["bad"], Refusal)
    assert problem in heard["bad"].error
    assert_answered(heard["good"], good)


@pytest.mark.parametrize(
    ("prompts", "prefix"),
    [
        ([], []),
        ([[1, 2, 3]], [1, 2, 3]),
        ([[1, 2, 3], [1, 2], [1, 2, 4]], [1, 2]),
        ([[1, 2], [1, 2, 3]], [1, 2]),
        ([[1, 2, 3], [4]], []),
        ([array("i", [1, 2, 3]), [1, 2, 4], (1, 2)], [1, 2]),
    ],
)
def test_what_requests_begin_with_is_expected(prompts, prefix):
    assert list(engine_host._common_prefix(prompts)) == prefix


def test_an_id_in_use_is_refused_and_its_first_user_answered(runner, host, outcomes):
    others: SimpleQueue[Outcome] = SimpleQueue()
    runner.close()
    first = request("same")
    host.submit([first], outcomes.put)
    host.submit([request("same", 4, 5)], others.put)
    runner.open()
    assert isinstance(take(others, 1)["same"], Refusal)
    assert_answered(take(outcomes, 1)["same"], first)


def test_leaving_drops_what_is_pending_and_ends_the_thread(runner, outcomes):
    runner.close()
    with hosted(runner) as (host, _):
        host.submit([request(str(n), params=replace(PARAMS, max_tokens=None)) for n in range(5000)], outcomes.put)
        runner.wait_until_reached()
    assert outcomes.qsize() < 5000
    assert "engine" not in {thread.name for thread in threading.enumerate()}
