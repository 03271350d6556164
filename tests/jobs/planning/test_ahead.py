"""Work beside the interpreter's: in order, a few items ahead, its errors the caller's."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.jobs.planning.ahead import map_ahead
from headrace.jobs.planning.collector import YOUNG_OBJECTS, leave_alone_what_is_there

NUM_AHEAD = 3


def test_results_come_in_order_and_only_so_many_items_are_taken_ahead():
    taken = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    results = map_ahead(lambda item: 10 * item, items(), NUM_AHEAD)
    for number, result in enumerate(results):
        assert result == 10 * number
        assert len(taken) <= number + 1 + NUM_AHEAD
    assert number == 19


def test_what_the_function_raises_reaches_the_caller_in_its_turn():
    def half(item: int) -> int:
        if item % 2:
            raise ValueError(f"{item} is odd")
        return item // 2

    results = map_ahead(half, [4, 8, 5, 6])
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ValueError, match="5 is odd"):
        next(results)


def test_what_the_items_raise_reaches_the_caller():
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(map_ahead(str, items()))


def test_the_collector_is_patient_until_the_last_of_several_has_planned():
    threshold = gc.get_threshold()
    first, second = leave_alone_what_is_there(), leave_alone_what_is_there()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] >= YOUNG_OBJECTS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == threshold


# Things that refer to themselves and live until the next job comes, as a server's requests do.
PLANS_AGAIN_AND_AGAIN = """
import gc
from headrace.jobs.planning.collector import leave_alone_what_is_there

class Thing:
    num_alive = 0

    def __init__(self):
        Thing.num_alive += 1
        self.me = self

    def __del__(self):
        Thing.num_alive -= 1

for _ in range(400):
    things = [Thing() for _ in range(500)]
    with leave_alone_what_is_there():
        pass
print(Thing.num_alive)
"""


def test_a_process_that_plans_again_and_again_is_rid_of_its_garbage():
    done = subprocess.run([sys.executable, "-P", "-c", PLANS_AGAIN_AND_AGAIN], check=True, capture_output=True)
    assert int(done.stdout) < 100_000
