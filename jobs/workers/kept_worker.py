"""A worker process that is started again whenever it dies."""

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from .worker_process import REFUSED, start_worker, stop_workers

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
# One that has lived for so long was well.
_WELL_SECONDS = 60.0


class KeptWorker:
    """Runs `headrace worker` with `options` from `start` to `stop`, and again when it dies, after growing pauses.

    Each line that it writes is passed to `on_line`; one for which that raises OSError is lost. `on_refusal` is told why
    it refuses to run, after which it is not started again. Both are called in a thread of this object's own.
    `environment`: its own, in the place of this process's.
    """

    def __init__(
        self,
        name: str,
        options: Sequence[str],
        on_line: Callable[[str], None],
        on_refusal: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._environment = environment
        self._options = tuple(options)
        self._on_line = on_line
        self._on_refusal = on_refusal
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        # The worker ends with the thread that started it. Should this process be made to end, it does not wait.
        self._thread = threading.Thread(target=self._run, name=f"worker {name}", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the worker has handed back what it has not finished and is gone."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            stop_workers([process])
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            begin = time.monotonic()
            status, last_words = self._live()
            if self._stopping.is_set():
                return
            if status == REFUSED:
                self._on_refusal(last_words.removeprefix("headrace: "))
                return
            if time.monotonic() - begin > _WELL_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            logger.error("%s: the worker ended with status %d, another in %g s", self._name, status, pause)
            self._stopping.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _live(self) -> tuple[int, str]:
        """One worker's life: its exit status and its last line."""
        with self._lock:
            if self._stopping.is_set():
                return 0, ""
            process = self._process = start_worker(
                self._options, subprocess.PIPE, environment=self._environment, in_own_group=True
            )
        assert process.stdout is not None
        last_words = ""
        with process.stdout as output:
            for line in output:
                if text := line.decode("utf-8", "replace").rstrip():
                    last_words = text
                    # A log that takes nothing, its disk being full or its reader gone, costs lines, not the worker.
                    with suppress(OSError):
                        self._on_line(text)
        return process.wait(), last_words
