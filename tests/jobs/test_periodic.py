"""What is done every so often goes on whatever an attempt at it brings about."""

import threading

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.jobs.periodic import Periodic

from .answers import WAIT_SECONDS


@pytest.mark.parametrize(
    "error", [RedisConnectionError("away"), RuntimeError("a fault of ours")], ids=["away", "fault"]
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
