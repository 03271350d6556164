"""Workers of our own for a job whose queue nobody serves, kept alive for as long as the job wants them."""

import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from ..errors import WorkerFailedError
from .presence import WorkerPresence
from .worker_process import REFUSED, start_worker, stop_workers

logger = logging.getLogger(__name__)

# A row that takes its worker with it is found at the latest in the fifth, and refused by the sixth.
_MAX_FRUITLESS_STARTS = 6


def log_of_worker(log: Path, number: int) -> Path:
    """The file of one of several workers; the first, of number 1, has `log` itself."""
    return log if number == 1 else log.with_stem(f"{log.stem}-{number}")


def logs_of_workers(log: Path) -> list[Path]:
    """The files of all workers that there were."""
    return [log, *log.parent.glob(f"{log.stem}-*{log.suffix}")]


class LocalWorkers:
    """Starts worker processes when a queue has none, and each again when it dies.

    A context manager: leaving it ends the workers, which hand back what they have not finished. They end by themselves
    when this process is killed. `options` are those of `headrace worker`, `environments` are each worker's own, in the
    place of this process's: there are as many workers. `tick` is to be called often, from the thread that entered the
    context. Their messages go to the file `log`, and to others beside it by `log_of_worker`.
    """

    def __init__(
        self,
        presence: WorkerPresence,
        queue: str,
        options: Sequence[str],
        log: Path,
        environments: Sequence[Mapping[str, str] | None] = (None,),
    ) -> None:
        self._presence = presence
        self._queue = queue
        self._workers = [
            _LocalWorker(tuple(options), log_of_worker(log, number), environment)
            for number, environment in enumerate(environments, 1)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        stop_workers([worker.process for worker in self._workers if worker.process is not None])
        for worker in self._workers:
            worker.process = None

    @property
    def pids(self) -> list[int]:
        """Of those that were started and not found dead since."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def tick(self, rows_done: int) -> None:
        """Start the workers that are missing, unless others serve the queue, or live on this host and are silent.

        Raises `WorkerFailedError` when all have been given up: each has died several times and `rows_done` has not
        grown meanwhile, or says itself that it can not run. One that is given up while others serve is logged.
        """
        for worker in self._workers:
            worker.note_end(rows_done, self._may_have_done_rows)
        lost = [worker for worker in self._workers if worker.failure is not None]
        if len(lost) == len(self._workers):
            raise WorkerFailedError(self._failure())
        # Most often all have the same reason, which is said once.
        if any(not worker.is_told_of for worker in lost) and self._presence.is_served(self._queue):
            self._tell_of(lost)
        missing = [worker for worker in self._workers if worker.process is None and worker.failure is None]
        if missing and not self._is_served_by_others():
            for worker in missing:
                worker.start(rows_done)

    def _is_served_by_others(self) -> bool:
        """Now, or soon again: beside a worker that is only starved another one would starve both."""
        presence, queue, own = self._presence, self._queue, self.pids
        return presence.is_served(queue, own) or presence.is_alive_here(queue, own)

    def _may_have_done_rows(self, pid: int) -> bool:
        """Whether rows that have ended may be this one's, and not only those of others beside it."""
        return len(self._workers) == 1 or self._presence.has_served(self._queue, pid)

    def _tell_of(self, lost: "Sequence[_LocalWorker]") -> None:
        for worker in lost:
            if not worker.is_told_of:
                worker.is_told_of = True
                number, size = self._workers.index(worker) + 1, len(self._workers)
                logger.warning("worker %d of %d %s", number, size, worker.failure)

    def _failure(self) -> str:
        failures = {worker.failure for worker in self._workers}
        if len(self._workers) == 1:
            return f"the worker {failures.pop()}"
        if len(failures) == 1:
            return f"the workers {failures.pop()}"
        return f"none of {len(self._workers)} workers is left: the first {self._workers[0].failure}"


class _LocalWorker:
    """One of them. `failure`: why it is not started again, once that is so."""

    def __init__(self, options: Sequence[str], log: Path, environment: Mapping[str, str] | None) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.failure: str | None = None
        self.is_told_of = False
        self._options = options
        self._log = log
        self._environment = environment
        self._rows_before = 0
        self._num_fruitless = 0

    def start(self, rows_done: int) -> None:
        self._rows_before = rows_done
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = start_worker(self._options, log, environment=self._environment)

    def note_end(self, rows_done: int, may_have_done_rows: Callable[[int], bool]) -> None:
        """Take note of its end, if it has ended. `may_have_done_rows`: whether one with that pid may."""
        process = self.process
        if process is None or (status := process.poll()) is None:
            return
        self.process = None
        is_fruitless = rows_done <= self._rows_before or not may_have_done_rows(process.pid)
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 0
        if status == REFUSED:
            self.failure = f"refused to start: {self._last_words()}"
        elif self._num_fruitless >= _MAX_FRUITLESS_STARTS:
            self.failure = (
                f"died {_MAX_FRUITLESS_STARTS} times without finishing a row (exit status {status}; "
                f"log: {self._log}): {self._last_words()}"
            )

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return last.removeprefix("headrace: ")
