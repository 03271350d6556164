"""What Python's garbage collector looks at while a job is planned."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# How many new objects there are when the collector looks at them: a batch of rows makes so many.
YOUNG_OBJECTS = 50_000


@contextmanager
def leave_alone_what_is_there() -> Iterator[None]:
    """Have the collector look only at what is made from here on, and more rarely.

    Millions of rows make it run thousands of times, each time over the hundreds of thousands of objects that the
    libraries consist of. Does nothing where the process keeps objects out of collections itself.
    """
    if gc.get_freeze_count():
        yield
        return
    young, *older = gc.get_threshold()
    gc.freeze()
    # Zero means never.
    gc.set_threshold(young and max(young, YOUNG_OBJECTS), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
