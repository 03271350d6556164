"""Work that needs no interpreter (tokenizing, writing files) beside work that does."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], num_ahead: int = 2) -> Iterator[Result]:
    """`function` of each item, in order, called in a thread of its own while the caller makes the next items.

    So many items are taken at most before the first of their results is. Raises what `function` does.
    """
    with ThreadPoolExecutor(1) as pool:
        begun: deque[Future[Result]] = deque()
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) > num_ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
