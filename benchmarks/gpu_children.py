"""The processes that measure `gpu.py`'s parts, one at a time: the next one imports what it needs while one measures."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from gpu_parts import Part

_LAST_WORDS_SECONDS = 1


class Children:
    """Those that were begun, by their parts' names. All of them, and what they started, end with it."""

    def __init__(self, command_of: Callable[[Part], list[str]]) -> None:
        """`command_of`: runs a part, once it reads a line from its standard input."""
        self._command_of = command_of
        self._waiting: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._waiting.values():
            _end(process)

    def run(self, part: Part, seconds: float, following: Part | None) -> str | None:
        """Have a part measured for at most so long, and have the following one's process get ready meanwhile.

        Returns why it failed, if it did.
        """
        self._start(part)
        if following is not None:
            self._start(following)
        process = self._waiting[part.name]
        try:
            process.communicate("\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            # It writes where it is, and may need a moment for that.
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_SECONDS)
            return f"stopped after {seconds:.0f} s"
        finally:
            _end(self._waiting.pop(part.name))
        return f"its process ended with status {process.returncode}" if process.returncode else None

    def _start(self, part: Part) -> None:
        if part.name not in self._waiting:
            # A group of its own: a peer that it started is to end with it, and would go on to use the GPU.
            self._waiting[part.name] = subprocess.Popen(
                self._command_of(part), stdin=subprocess.PIPE, text=True, process_group=0
            )


def _end(process: "subprocess.Popen[str]") -> None:
    """It and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
