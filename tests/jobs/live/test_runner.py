"""A worker's live requests: each stream is the engine's answer, whatever happens on the way."""

import threading
import time

import pytest
from redis import Redis

from headrace.engine.request import Request, SamplingParams
from headrace.jobs.engine_host import EngineHost
from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveState
from headrace.jobs.streams.keys import stream_key

from ...engine.fakes import CONTEXT, VOCAB_SIZE
from ..answers import WAIT_SECONDS
from .desk import LONG, SAMPLING, Desk, InProcessWorker


@pytest.fixture
def ends(desk, wait_until):
    def wait(request):
        wait_until(lambda: desk.requests.get(request.id).state is LiveState.ENDED, f"{request.id} has ended")

    return wait


def error_of(desk: Desk, stream_id: str) -> str:
    end = desk.events(stream_id)[-1]
    assert end.finish_reason == "error"
    return end.error.code


def when_told(host: EngineHost, method: str, monkeypatch) -> threading.Event:
    """Set as soon as the host has got such a command: before its next step it carries it out."""
    told, tell = threading.Event(), getattr(host, method)

    def tell_and_note(*args) -> None:
        tell(*args)
        told.set()

    monkeypatch.setattr(host, method, tell_and_note)
    return told


def stop_after(desk, worker: InProcessWorker, request, num_tokens: int, wait_until) -> None:
    """Let the closed engine compute so many tokens, and wait until they are streamed."""
    worker.runner.permit(num_tokens)
    wait_until(lambda: desk.num_streamed(request.id) == num_tokens, f"{num_tokens} tokens are streamed")


def test_the_stream_is_the_answer(desk, wait_until, ends):
    with desk.worker() as worker:
        request = desk.submitted()
        assert desk.requests.num_waiting(desk.queue) == 1
        worker.live.ring(request.id)
        desk.assert_streamed(request)
        ends(request)
        assert desk.requests.num_waiting(desk.queue) == 0
        wait_until(lambda: worker.live.num_in_flight == 0, "it is forgotten")


def test_tokens_come_one_by_one(desk, wait_until):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        for count in range(1, 4):
            worker.runner.permit(1)
            wait_until(lambda count=count: desk.num_streamed(request.id) == count, f"token {count} is streamed")
        worker.runner.open()
        events = desk.assert_streamed(request)
        assert [len(event.token_ids) for event in events[:3]] == [1, 1, 1]


def test_many_at_a_time(desk):
    with desk.worker() as worker:
        requests = [desk.submitted(1 + number % 10, 2, seed=number) for number in range(40)]
        for request in requests:
            worker.live.ring(request.id)
        for request in requests:
            desk.assert_streamed(request)


def test_each_sample_has_its_stream(desk, ends):
    with desk.worker() as worker:
        request = desk.submitted(n=3)
        worker.live.ring(request.id)
        answers = [desk.assert_streamed(request, sample) for sample in range(3)]
        assert request.stream_ids == (request.id, f"{request.id}/1", f"{request.id}/2")
        assert len({tuple(event.token_ids for event in events) for events in answers}) == 3
        ends(request)


def test_logprobs_come_with_their_tokens(desk):
    with desk.worker() as worker:
        request = desk.submitted(logprobs=True, top_logprobs=2)
        worker.live.ring(request.id)
        events = desk.assert_streamed(request)
        items = [item for event in events[:-1] for item in event.logprobs]
        assert [item["token_id"] for item in items] == desk.tokens(request)
        assert all(len(item["top"]) == 2 and item["logprob"] < 0 for item in items)


def test_a_choice_comes_whole(desk):
    with desk.worker() as worker:
        request = desk.request(temperature=0.0, choices=["a b", "b c d"])
        request = request.model_copy(update={"sampling": request.sampling.model_copy(update={"ignore_eos": False})})
        desk.requests.submit(request)
        worker.live.ring(request.id)
        events = desk.events(request.id)
        assert "".join(event.text for event in events) in request.choices
        assert events[-1].finish_reason == "stop"


def test_a_stop_string_is_not_streamed(desk):
    with desk.worker() as worker:
        plain = desk.request()
        words = desk.tokenizer.decode(desk.tokens(plain)).split()
        stop = " ".join(words[4:6])
        request = desk.submitted(stop=(stop,))
        worker.live.ring(request.id)
        events = desk.events(request.id)
        text = "".join(event.text for event in events)
        assert text == " ".join(words).partition(stop)[0]
        assert events[-1].finish_reason == "stop"
        assert all(stop not in event.text for event in events)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [((1,) * CONTEXT, "context_length_exceeded"), ((VOCAB_SIZE,), "invalid_request")],
    ids=["too long", "no such token"],
)
def test_what_the_engine_refuses(prompt, code, desk, ends):
    with desk.worker() as worker:
        request = desk.submitted(*prompt, n=2)
        worker.live.ring(request.id)
        assert [error_of(desk, stream_id) for stream_id in request.stream_ids] == [code, code]
        ends(request)
        assert worker.runner.num_sequences_started == 0


def heard(desk: Desk, worker: InProcessWorker, wait_until) -> None:
    """Answer the next bell that was rung over Redis."""

    def take() -> bool:
        with Redis.from_url(desk.url) as redis:
            return redis.lpop(desk.queue) is not None

    wait_until(take, "a bell rings")
    with Redis.from_url(desk.url, decode_responses=True) as redis:
        (request_id,) = redis.zrange(f"headrace:live:open:{desk.queue}", 0, -1)
    worker.live.ring(request_id)


def test_after_an_engine_failure_it_goes_on_where_it_was(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        with Redis.from_url(desk.url) as redis:
            redis.delete(desk.queue)
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 5, wait_until)
        worker.runner.fail = RuntimeError("asked for by the test")
        worker.runner.permit(1)
        wait_until(lambda: desk.requests.get(request.id).state is LiveState.QUEUED, "it was handed back")
        worker.runner.fail = None
        before = worker.host.stats.num_steps
        worker.runner.open()
        heard(desk, worker, wait_until)
        desk.assert_streamed(request)
        assert desk.requests.get(request.id).attempt == 2
        assert worker.host.stats.num_steps - before == len(desk.tokens(request)) - 5
        ends(request)


def test_an_engine_that_always_fails_is_tried_three_times(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.fail = RuntimeError("asked for by the test")
        request = desk.submitted()
        for _ in range(3):
            heard(desk, worker, wait_until)
        assert error_of(desk, request.id) == "engine_failed"
        ends(request)
        assert desk.requests.get(request.id).attempt == 3


def test_a_cancelled_request_frees_its_blocks(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 3, wait_until)
        desk.requests.cancel(request.id)
        worker.live.cancel(request.id)
        ends(request)
        assert desk.events(request.id)[-1].finish_reason == "abort"
        # The step that stands at the gate is the last with it.
        worker.runner.permit(1)
        wait_until(lambda: worker.host.stats.num_running == 0, "its blocks are free")
        assert desk.num_streamed(request.id) == 3


def test_what_is_called_off_while_it_is_claimed_is_never_begun(desk, ends, monkeypatch):
    """Between Redis' answer and its being known here: the listener's word must not be lost."""
    with desk.worker() as worker:
        request, other = desk.submitted(), desk.submitted()
        claim_all = worker.claims.claim_all

        def claim_and_call_off(request_ids):
            claimed = claim_all(request_ids)
            if request.id in request_ids:
                desk.requests.cancel(request.id)
                worker.live.cancel(request.id)
            return claimed

        monkeypatch.setattr(worker.claims, "claim_all", claim_and_call_off)
        for each in (request, other):
            worker.live.ring(each.id)
        ends(request)
        (end,) = desk.events(request.id)
        assert end.finish_reason == "abort"
        desk.assert_streamed(other)


def test_a_missed_cancellation_is_found_with_the_next_renewal(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        worker.runner.wait_until_reached()
        desk.requests.cancel(request.id)
        worker.live.renew_leases()
        ends(request)
        assert desk.events(request.id)[-1].finish_reason == "abort"


def test_what_was_cancelled_in_the_queue_is_never_begun(desk, ends):
    with desk.worker() as worker:
        request = desk.submitted()
        desk.requests.cancel(request.id)
        worker.live.ring(request.id)
        (end,) = desk.events(request.id)
        assert end.finish_reason == "abort"
        ends(request)
        assert worker.runner.num_sequences_started == 0


def test_past_its_deadline_it_is_not_begun(desk, ends):
    with desk.worker() as worker:
        request = desk.submitted(timeout_seconds=-1)
        worker.live.ring(request.id)
        assert error_of(desk, request.id) == "deadline_exceeded"
        ends(request)
        assert worker.runner.num_sequences_started == 0


def test_its_deadline_ends_it(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 2, wait_until)
        (answer,) = worker.live._answers.all()
        # Time flies.
        answer.deadline = time.monotonic()
        assert error_of(desk, request.id) == "deadline_exceeded"
        ends(request)
        assert desk.num_streamed(request.id) == 2


def test_two_bells_are_one_answer(desk):
    with desk.worker() as worker, desk.worker() as other:
        request = desk.submitted()
        for each in (worker, other, worker):
            each.live.ring(request.id)
        desk.assert_streamed(request)
        assert worker.runner.num_sequences_started + other.runner.num_sequences_started == 1


@pytest.mark.parametrize("num_samples", [1, 3])
def test_another_worker_goes_on_after_the_last_token(num_samples, desk, wait_until, ends):
    """What was streamed is not computed again, and the worker that was taken for dead can add nothing."""
    with desk.worker(lease_seconds=0.0) as slow, desk.worker() as heir:
        slow.runner.close()
        request = desk.submitted(n=num_samples)
        slow.live.ring(request.id)
        stop_after(desk, slow, request, 7, wait_until)
        # The samples start from the first one's prompt, and each step brings a token of each.
        streamed = dict.fromkeys(request.stream_ids, 7)
        wait_until(lambda: {each: desk.num_streamed(each) for each in streamed} == streamed, "all are there")
        heir.live.ring(request.id)
        for sample in range(num_samples):
            desk.assert_streamed(request, sample)
        ends(request)
        rest = [len(desk.tokens(request, k)) - streamed[stream_id] for k, stream_id in enumerate(streamed)]
        assert heir.host.stats.num_steps == max(rest)
        slow.runner.open()
        slow.live.renew_leases()
        wait_until(lambda: slow.live.num_in_flight == 0, "the slow worker has let go")
        for sample in range(num_samples):
            desk.assert_streamed(request, sample)
        assert desk.requests.get(request.id).attempt == 2


def test_a_request_that_takes_its_workers_with_it_is_refused(desk, ends):
    with desk.worker(lease_seconds=0.0) as dying, desk.worker(lease_seconds=0.0) as also_dying, desk.worker() as last:
        request = desk.submitted()
        for worker in (dying, also_dying):
            worker.runner.close()
            worker.live.ring(request.id)
            worker.runner.wait_until_reached()
        last.live.ring(request.id)
        assert error_of(desk, request.id) == "worker_crashed"
        ends(request)
        assert last.runner.num_sequences_started == 0


def test_a_lost_bell_is_found(desk, wait_until):
    with desk.worker() as worker:
        request = desk.submitted()
        with Redis.from_url(desk.url) as redis:
            redis.delete(desk.queue)

        def swept() -> bool:
            worker.live.sweep()
            with Redis.from_url(desk.url) as redis:
                return redis.llen(desk.queue) == 1

        wait_until(swept, "the sweeper rings")
        heard(desk, worker, wait_until)
        desk.assert_streamed(request)


def test_told_to_stop_it_finishes_what_it_can(desk):
    with desk.worker(grace_seconds=20.0) as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        worker.runner.wait_until_reached()
        worker.live.drain()
        worker.runner.open()
    desk.assert_streamed(request)
    assert desk.requests.get(request.id).state is LiveState.ENDED


def test_told_to_stop_it_hands_back_the_rest(desk, wait_until):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 6, wait_until)
    record = desk.requests.get(request.id)
    assert (record.state, record.attempt) == (LiveState.QUEUED, 1)
    with desk.worker() as heir:
        heard(desk, heir, wait_until)
        desk.assert_streamed(request)
        assert heir.host.stats.num_steps == len(desk.tokens(request)) - 6


def test_a_worker_that_stops_passes_bells_on(desk, wait_until):
    with desk.worker() as worker:
        request = desk.submitted()
        with Redis.from_url(desk.url) as redis:
            redis.delete(desk.queue)
            worker.live.drain()
            worker.live.ring(request.id)
            wait_until(lambda: redis.llen(desk.queue) == 1, "the bell is in the queue again")
        assert desk.requests.get(request.id).state is LiveState.QUEUED


def test_a_redis_that_forgets_everything(desk, wait_until, ends):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 5, wait_until)
        with Redis.from_url(desk.url) as redis:
            redis.delete(request_key(request.id), stream_key(request.id), f"headrace:live:open:{desk.queue}")
        worker.live.renew_leases()
        worker.runner.open()
        desk.assert_streamed(request)
        ends(request)


def test_what_redis_forgot_and_is_asked_again_has_its_end(desk, wait_until, ends):
    """Its attempts are counted anew, below the one that writes its stream."""
    with desk.worker(lease_seconds=0.0) as dead, desk.worker() as slow, desk.worker() as heir:
        request = desk.submitted()
        for worker in (dead, slow):
            worker.runner.close()
            worker.live.ring(request.id)
            worker.runner.wait_until_reached()
        stop_after(desk, slow, request, 5, wait_until)
        with Redis.from_url(desk.url) as redis:
            redis.delete(request_key(request.id), f"headrace:live:open:{desk.queue}")
            desk.requests.submit(request)
            redis.delete(desk.queue)
            heir.live.ring(request.id)
            wait_until(lambda: heir.runner.num_sequences_started and not heir.live.num_in_flight, "it is refused")
            assert desk.requests.get(request.id).state is LiveState.QUEUED

            def swept() -> bool:
                heir.live.sweep()
                return redis.llen(desk.queue) == 1

            wait_until(swept, "the sweeper rings")
        heard(desk, heir, wait_until)
        desk.assert_streamed(request)
        ends(request)
        assert desk.requests.get(request.id).attempt == 3
        slow.live.renew_leases()
        wait_until(lambda: slow.live.num_in_flight == 0, "the slow worker has let go")


def test_live_requests_go_before_bulk_rows(desk, wait_until, monkeypatch):
    """Every seat is taken: the request has its first token with the very next step."""
    with desk.worker(max_num_seqs=4) as worker:
        worker.runner.close()
        params = SamplingParams(**SAMPLING | {"max_tokens": 30})
        rows = [Request(f"row {row}", (1 + row, 2), params) for row in range(4)]
        worker.host.submit(rows, lambda _: None)
        worker.runner.wait_until_reached()
        submitted = when_told(worker.host, "submit", monkeypatch)
        request = desk.submitted()
        worker.live.ring(request.id)
        assert submitted.wait(WAIT_SECONDS), "the engine's host has it"
        # The first of these steps began before the request came.
        worker.runner.permit(2)
        wait_until(lambda: desk.num_streamed(request.id) == 1, "its first token is streamed")
        assert worker.host.stats.num_steps == 2
        worker.runner.open()
        desk.assert_streamed(request)


@pytest.mark.parametrize("why", ["cancelled", "overdue"])
def test_what_ends_while_it_is_being_claimed(why, desk, monkeypatch, wait_until, ends):
    """Another attempt's tokens are still being read: the stream has its end all the same, and nothing is generated."""
    with desk.worker() as first:
        request = desk.submitted(timeout_seconds=LONG if why == "cancelled" else 0.5)
        first.claims.release(first.claims.claim(request.id), has_failed=False)
        recover, reading, may_go_on = first.publisher.recover, threading.Event(), threading.Event()

        def slowly(attempts):
            reading.set()
            assert may_go_on.wait(WAIT_SECONDS)
            return recover(attempts)

        monkeypatch.setattr(first.publisher, "recover", slowly)
        first.live.ring(request.id)
        assert reading.wait(WAIT_SECONDS)
        (answer,) = first.live._answers.all()
        if why == "cancelled":
            assert desk.requests.cancel(request.id)
            first.live.cancel(request.id)
        wait_until(lambda: answer.interrupted is not None, "the runner knows")
        may_go_on.set()
        end = desk.events(request.id)[-1]
        assert (end.finish_reason, end.error and end.error.code) == {
            "cancelled": ("abort", None),
            "overdue": ("error", "deadline_exceeded"),
        }[why]
        ends(request)
        wait_until(lambda: first.live.num_in_flight == 0, "it is forgotten")
        assert first.runner.num_sequences_started == 0


def test_a_grammar_that_the_models_tokens_can_not_spell_ends_its_request(desk, ends):
    """Only the worker, which has the model's tokenizer, can find that out; the other requests do not notice."""
    with desk.worker() as worker:
        refused = desk.submitted(structured_outputs={"regex": "[0-9]{3}"}, ignore_eos=False, n=2)
        fine = desk.submitted()
        for request in (refused, fine):
            worker.live.ring(request.id)
        assert [error_of(desk, stream_id) for stream_id in refused.stream_ids] == ["invalid_request"] * 2
        desk.assert_streamed(fine)
        ends(refused)


def test_what_waits_for_its_turn_is_not_to_blame_when_the_worker_dies(desk, wait_until, monkeypatch):
    with desk.worker(lease_seconds=0.0, num_slots=1) as dies, desk.worker(lease_seconds=0.0) as heir:
        dies.runner.close()
        running, begun, waiting = (desk.submitted() for _ in range(3))
        for request in (running, begun, waiting):
            dies.live.ring(request.id)
        wait_until(lambda: dies.live.num_in_flight == 3, "all are claimed")
        stop_after(desk, dies, running, 1, wait_until)
        dies.live.renew_leases()
        aborted = when_told(dies.host, "abort", monkeypatch)
        dies.live.cancel(running.id)
        assert aborted.wait(WAIT_SECONDS), "the engine's host drops the first"
        # The step that stands at the gate is the last with it.
        dies.runner.permit(2)
        wait_until(lambda: desk.num_streamed(begun.id) == 1, "the second has its turn")
        crashes = [heir.claims.claim(request.id).num_crashes for request in (begun, waiting)]
        assert crashes == [1, 0]
        dies.runner.open()


def test_a_request_that_cannot_be_begun_ends_alone(desk, wait_until, ends, monkeypatch):
    with desk.worker() as worker:
        bad, good = desk.submitted(), desk.submitted()
        submit = worker.host.submit

        def submit_good(requests, *sinks):
            if requests[0].request_id.startswith(bad.id):
                raise RuntimeError("not this one")
            submit(requests, *sinks)

        monkeypatch.setattr(worker.host, "submit", submit_good)
        for request in (bad, good):
            worker.live.ring(request.id)
        desk.assert_streamed(good)
        assert error_of(desk, bad.id) == "internal_error"
        ends(bad)
        wait_until(lambda: worker.live.num_in_flight == 0, "both are forgotten")
