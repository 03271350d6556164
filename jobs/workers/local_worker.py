"""A worker of our own for a job whose queue nobody serves, kept alive for as long as the job wants it."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from ..errors import WorkerFailedError
from .presence import WorkerPresence
from .worker_process import REFUSED, start_worker, stop_worker

# A row that takes its worker with it is found at the latest in the fifth, and refused by the sixth.
_MAX_FRUITLESS_STARTS = 6


class LocalWorker:
    """Starts a worker process when a queue has none, and again when it dies.

    A context manager: leaving it ends the worker, which hands back what it has not finished. The worker ends by
    itself when this process is killed. `options` are those of `headrace worker`, `environment` is the worker's own, in
    the place of this process's. `tick` is to be called often, from the thread that entered the context. Its messages
    go to the file `log`.
    """

    def __init__(
        self,
        presence: WorkerPresence,
        queue: str,
        options: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._environment = environment
        self._presence = presence
        self._queue = queue
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts_without_progress = 0
        self._rows_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def tick(self, rows_done: int) -> None:
        """Start the worker if none serves the queue, and none that has gone silent is alive on this host.

        Raises `WorkerFailedError` when it has died several times and `rows_done` has not grown meanwhile, or when
        it says itself that it can not run.
        """
        if rows_done > self._rows_done:
            self._rows_done, self._num_starts_without_progress = rows_done, 0
        if self._process is not None:
            self._reap(self._process)
        if self._process is None and not self._is_served():
            self._start()

    def _is_served(self) -> bool:
        """Now, or soon again: beside a worker that is only starved a second one would starve both."""
        return self._presence.is_served(self._queue) or self._presence.is_alive_here(self._queue)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        status = process.poll()
        if status is None:
            return
        self._process = None
        if status == REFUSED:
            raise WorkerFailedError(f"the worker refused to start: {self._last_words()}")
        if self._num_starts_without_progress >= _MAX_FRUITLESS_STARTS:
            raise WorkerFailedError(
                f"the worker died {_MAX_FRUITLESS_STARTS} times without finishing a row (exit status {status}; "
                f"log: {self._log}): {self._last_words()}"
            )

    def _start(self) -> None:
        self._num_starts_without_progress += 1
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = start_worker(self._options, log, environment=self._environment)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return last.removeprefix("headrace: ")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            stop_worker(process)
