"""What is done every so often goes on whatever an attempt at it brings about."""

import threading

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.jobs.periodic import Periodic
from headrace.storage.errors import LedgerUnavailable

from .answers import WAIT_SECONDS


@pytest.mark.parametrize(
    "error",
    [RedisConnectionError("away"), LedgerUnavailable("the database is locked"), RuntimeError("a fault of ours")],
    ids=["away", "locked", "fault"],
)
def test_an_action_that_fails_is_done_again(error, caplog):
    again, calls = threading.Event(), []

    def act():
        calls.append(error)
        if len(calls) == 1:
            raise error
        again.set()

    with Periodic("lease renewal", 0.001, act):
        assert again.wait(WAIT_SECONDS)
    assert "lease renewal" in caplog.text
    assert ("Traceback" in caplog.text) is isinstance(error, RuntimeError)


def test_leaving_ends_the_thread():
    with Periodic("test", 0.001, lambda: None):
        assert "test" in {thread.name for thread in threading.enumerate()}
    assert "test" not in {thread.name for thread in threading.enumerate()}
