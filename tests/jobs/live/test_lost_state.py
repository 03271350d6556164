"""A Redis that loses bells or records: what was asked is answered all the same."""

from redis import Redis

from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveState
from headrace.jobs.streams.keys import stream_key

from .desk import heard, stop_after


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
