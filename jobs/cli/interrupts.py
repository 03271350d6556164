"""How commands that run for long are told to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """End on SIGTERM, and on SIGHUP, as on Ctrl-C: `KeyboardInterrupt` is raised in the main thread.

    Once: what is told again while a command ends would have it leave its workers as they are. `nohup` has a closed
    terminal ignored, which it stays.
    """

    is_told = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            raise KeyboardInterrupt

    heard = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    before = {each: signal.signal(each, interrupt) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
