"""How commands that run for long are told to stop."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..workers.worker_process import STOP_SECONDS


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """End on SIGTERM, and on SIGHUP, as on Ctrl-C: `KeyboardInterrupt` is raised in the main thread.

    What is told again soon, while a command ends, would have it leave its workers as they are, and is not heard; later
    it is, as Python loses an exception that is raised where it cleans up. `nohup` has a closed terminal ignored, which
    it stays.
    """

    heard_at = -math.inf

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        if time.monotonic() > heard_at + STOP_SECONDS:
            heard_at = time.monotonic()
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
