"""What is done every so often goes on whatever an attempt at it brings about."""

import threading

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.jobs import rare_warnings
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


def test_what_goes_wrong_for_long_is_said_once_and_something_else_at_once(caplog):
    enough, problems = threading.Event(), [*(f"full at {second}" for second in range(20)), "locked"]

    def act():
        if not problems:
            enough.set()
        raise LedgerUnavailable(problems.pop(0) if problems else "locked")

    with Periodic("sweeper", 0.001, act):
        assert enough.wait(WAIT_SECONDS)
    assert [record.getMessage() for record in caplog.records] == [
        "sweeper: full at 0; trying again",
        "sweeper: locked; trying again",
    ]


def test_what_goes_on_is_said_again_after_a_while(caplog, monkeypatch):
    monkeypatch.setattr(rare_warnings, "_REPEAT_SECONDS", 0.0)
    enough, problems = threading.Event(), [f"full at {second}" for second in range(3)]

    def act():
        if not problems:
            enough.set()
            return
        raise LedgerUnavailable(problems.pop(0))

    with Periodic("sweeper", 0.001, act):
        assert enough.wait(WAIT_SECONDS)
    assert len(caplog.records) == 3


def test_leaving_ends_the_thread():
    with Periodic("test", 0.001, lambda: None):
        assert "test" in {thread.name for thread in threading.enumerate()}
    assert "test" not in {thread.name for thread in threading.enumerate()}
