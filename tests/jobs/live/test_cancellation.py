"""Requests that are called off or run out of time: they end, and cost nothing more."""

import threading
import time

import pytest

from headrace.jobs.live import cancel_listener
from headrace.jobs.live.cancel_listener import CancelListener

from ..answers import WAIT_SECONDS
from .desk import claim_one, error_of, stop_after


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


@pytest.mark.parametrize("why", ["cancelled", "overdue"])
def test_what_ends_while_it_is_being_claimed(why, desk, monkeypatch, wait_until, ends):
    """Another attempt's tokens are still being read: the stream has its end all the same, and nothing is generated."""
    with desk.worker() as first:
        request = desk.submitted()
        first.claims.release(claim_one(first.claims, request.id), has_failed=False)
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
        else:
            # Time flies.
            answer.deadline = time.monotonic()
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


def test_a_redis_that_is_away_for_long_is_named_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cancel_listener, "_RETRY_SECONDS", 0.001)
    tries: list[int] = []
    enough = threading.Event()

    class Listener(CancelListener):
        def _listen(self):
            tries.append(1)
            if len(tries) == 3:
                enough.set()
            super()._listen()

    with Listener(f"unix://{tmp_path}/nobody.sock", lambda request_id: None):
        assert enough.wait(WAIT_SECONDS)
    assert caplog.text.count("listening for cancellations") == 1
