"""What Python's garbage collector looks at while a great many objects are made, and kept."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# How many new objects there are when the collector looks at them: a batch of rows makes so many, as do some thousands
# of requests.
YOUNG_OBJECTS = 50_000

# Of each that makes them now: what the threshold was before.
_before: list[tuple[int, int, int]] = []
_lock = threading.Lock()


@contextmanager
def leave_alone_what_is_there() -> Iterator[None]:
    """Have the collector look at what is new only once there is much of it, and so rarely at all the rest.

    Millions of rows make it run thousands of times else, and each time that it looks at all it goes through every token
    of the prompts that a caller has as lists. Nothing is frozen for as long: that sets the collector's counts back, and
    a process that does so again and again would never be rid of what refers to itself.
    """
    with _lock:
        young, *older = before = gc.get_threshold()
        _before.append(before)
        # Zero means never.
        gc.set_threshold(young and max(young, YOUNG_OBJECTS), *older)
    try:
        yield
    finally:
        with _lock:
            gc.set_threshold(*_before.pop())
