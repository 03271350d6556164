"""What Python's garbage collector looks at while a job is planned."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leave_alone_what_is_there() -> Iterator[None]:
    """Have the collector look only at what is made from here on.

    Millions of rows make it run thousands of times, each time over the hundreds of thousands of objects that the
    libraries consist of. Does nothing where the process keeps objects out of collections itself.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
