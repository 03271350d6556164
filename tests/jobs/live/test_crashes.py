"""Engines that fail and workers that die: another attempt goes on after the last token, but not for ever."""

import pytest
from redis import Redis

from headrace.jobs.live.requests import LiveState

from ..answers import WAIT_SECONDS
from .desk import claim_one, error_of, heard, stop_after, when_told


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


def test_a_worker_that_takes_its_own_again_streams_it_once(desk, wait_until, ends, monkeypatch):
    """It was starved for longer than the lease; the answer of before is still in its engine, and is dropped there."""
    with desk.worker(lease_seconds=0.0) as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        stop_after(desk, worker, request, 5, wait_until)
        dropped = when_told(worker.host, "abort", monkeypatch)
        worker.live.ring(request.id)
        assert dropped.wait(WAIT_SECONDS), "the engine's host drops the earlier attempt"
        worker.runner.open()
        desk.assert_streamed(request)
        ends(request)
        assert desk.requests.get(request.id).attempt == 2
        wait_until(lambda: worker.live.num_in_flight == 0, "both attempts are forgotten")
        wait_until(lambda: worker.host.stats.num_running == 0, "its blocks are free")


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
        crashes = [claim_one(heir.claims, request.id).num_crashes for request in (begun, waiting)]
        assert crashes == [1, 0]
        dies.runner.open()
