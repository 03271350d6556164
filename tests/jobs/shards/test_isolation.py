"""Which rows are tried apart after crashes, and that they have the engine to themselves."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.jobs.errors import Stopped
from headrace.jobs.shards.isolation import CrashHistory, EngineRoom
from headrace.storage.ledger.records import AttemptOutcome, AttemptRecord

from ..conftest import wait_until


def history(*trials: Sequence[int] | None, outcome: AttemptOutcome = AttemptOutcome.LOST) -> CrashHistory:
    """Of attempts of a worker each that all ended alike, each with what it was just trying."""
    return CrashHistory.of(attempt(number, f"w{number}", outcome, trial) for number, trial in enumerate(trials))


def attempt(
    number: int, owner: str, outcome: AttemptOutcome | None, trial: Sequence[int] | None = None
) -> AttemptRecord:
    return AttemptRecord(number, "s", number, owner, 0.0, 1.0, outcome, None, None if trial is None else list(trial))


def test_one_crash_may_be_anybodys_fault():
    assert not history().asks_for_trials
    assert not history(None).asks_for_trials
    assert history(None, None).asks_for_trials


@pytest.mark.parametrize("outcome", [each for each in AttemptOutcome if each is not AttemptOutcome.LOST])
def test_only_crashes_count(outcome):
    assert not history(None, [3], [3], outcome=outcome).asks_for_trials
    assert not history(None, [3], [3], outcome=outcome).culprits


def test_a_worker_that_comes_back_has_not_crashed():
    """It was starved for longer than its lease, perhaps again and again."""
    lost = [attempt(number, "starved", AttemptOutcome.LOST, [3]) for number in range(4)]
    assert not CrashHistory.of([*lost, attempt(4, "starved", None)]).trials
    found = CrashHistory.of([*lost, attempt(4, "other", AttemptOutcome.LOST, [3]), attempt(5, "starved", None)])
    assert (found.num_crashes, found.culprits) == (1, frozenset())
    # Whatever became of the last one, it can have died in no other.
    assert CrashHistory.of(lost).num_crashes == 1


def test_each_crash_narrows_the_circle():
    rows = range(256)
    first = history(None, None).groups(rows)
    assert [row for group in first for row in group] == list(rows)
    assert {len(group) for group in first} == {16}
    second = history(None, None, first[3]).groups(rows)
    assert sorted(row for group in second for row in group) == list(rows)
    assert [group for group in second if len(group) == 1] == [[row] for row in first[3]]


def test_rows_done_meanwhile_are_not_tried_again():
    assert history(None, None, [4, 5, 6]).groups([5, 9]) == [[5], [9]]
    assert history(None, None).groups([]) == []


def test_a_row_alone_at_two_crashes_is_guilty():
    assert history(None, None, [4, 5], [4]).culprits == frozenset()
    assert history(None, None, [4, 5], [4], [5]).culprits == frozenset()
    assert history(None, None, [4, 5], [4], [5], [4]).culprits == {4}


def test_who_is_alone_waits_for_the_others_and_keeps_new_ones_out():
    room, stop = EngineRoom(), threading.Event()
    inside, leave = threading.Event(), threading.Event()

    def be_alone() -> None:
        with room.alone(stop):
            inside.set()
            assert leave.wait(60)

    def enter() -> None:
        with room.together(stop):
            pass

    with ThreadPoolExecutor(2) as pool:
        with room.together(stop), room.together(stop):
            alone = pool.submit(be_alone)
            wait_until(lambda: room._is_reserved, "one wants to be alone")
            late = pool.submit(enter)
            assert not inside.is_set()
        assert inside.wait(60)
        assert not late.done()
        leave.set()
        alone.result(60)
        late.result(60)


def test_waiting_ends_when_the_attempt_is_told_to_stop():
    room, stop, other = EngineRoom(), threading.Event(), threading.Event()
    stop.set()
    with room.together(other), pytest.raises(Stopped), room.alone(stop):
        pytest.fail("it is not alone")
    with room.alone(other), pytest.raises(Stopped), room.together(stop):
        pytest.fail("another is alone")
    with room.together(stop), room.together(stop):
        assert room._num_inside == 2
