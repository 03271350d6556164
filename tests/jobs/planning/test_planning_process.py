"""Work beside the interpreter's: in order, a few items ahead, its errors the caller's."""

from collections.abc import Iterator

import pytest

from headrace.jobs.planning.planning_process import map_ahead

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
