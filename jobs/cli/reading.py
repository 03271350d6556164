"""How far a large input is read while a job is made of it, which takes minutes with millions of rows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...storage.readers import InputSource
from ..client.display import OneLine, counted, is_looked_at, print_line

# Most inputs are read by then.
_FIRST_SECONDS = 2.0
_REDRAWN_SECONDS = 0.5
_PLAIN_LINE_SECONDS = 5.0


@contextmanager
def shown_reading(source: InputSource) -> Iterator[None]:
    """On standard error, while another thread reads: a line on a terminal, one every few seconds elsewhere."""
    is_over = threading.Event()
    thread = threading.Thread(target=_show, args=(source, is_over), name="reading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _show(source: InputSource, is_over: threading.Event) -> None:
    if is_over.wait(_FIRST_SECONDS):
        return
    if not is_looked_at():
        while not is_over.wait(_PLAIN_LINE_SECONDS):
            print_line(_line(source))
        return
    line = OneLine()
    line.show(_line(source))
    while not is_over.wait(_REDRAWN_SECONDS):
        line.show(_line(source))
    line.end()


def _line(source: InputSource) -> str:
    return f"reading: {counted(source.num_read, 'row')}"
