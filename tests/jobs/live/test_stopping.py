"""Workers that are told to stop finish, hand back or pass on what they have."""

from redis import Redis

from headrace.jobs.live.requests import LiveState

from .desk import heard, stop_after


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
