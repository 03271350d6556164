"""A job that was submitted: follow it, steer it, read its results."""

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa
from redis.exceptions import RedisError

from ...storage.errors import LedgerUnavailable
from ...storage.ledger.records import JobRecord, JobState, Progress
from ..broker.redis_access import trouble_of
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import JobError
from ..results.stored_results import read_results
from ..shards.finishing import finish_what_is_left
from ..spec.priority import checked_priority
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from ..workers.local_workers import LocalWorkers
from .connections import Connections
from .verbs import cancel_job, delete_job, retry_job

_POLL_SECONDS = 0.25
# For each second that the ledger took to answer.
_PAUSE, _LONGEST_PAUSE_SECONDS = 4.0, 2.0


class JobTimeoutError(JobError, TimeoutError):
    """A job did not end in the time given."""


@dataclass(frozen=True)
class Job:
    """One job. `record` is what the ledger said when this object was made."""

    client: Connections
    record: JobRecord

    def __repr__(self) -> str:
        return f"Job(id={self.id!r}, output={self.record.output_dir!r})"

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def spec(self) -> JobSpec:
        return read_stored(JobSpec, self.record.spec)

    def progress(self) -> Progress:
        """What is committed now."""
        return self.client.ledger.progress(self.id)

    def watch(self, timeout: float | None = None) -> Iterator[Progress]:
        """The progress, again and again, until the job has ended.

        A ledger or a Redis that goes away meanwhile is waited for, as where its disk or memory is full.

        Raises `JobTimeoutError` after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        progress = self.progress()
        while True:
            pause, began = _POLL_SECONDS, time.monotonic()
            try:
                progress = self.progress()
                # Of a job of a hundred thousand parts the ledger would have nothing else to do.
                pause = min(max(pause, _PAUSE * (time.monotonic() - began)), _LONGEST_PAUSE_SECONDS)
                self.client.ensure_redis()
            except (LedgerUnavailable, EmbeddedValkeyError) as error:
                progress = replace(progress, error=str(error))
            else:
                if progress.state is JobState.RUNNING and (trouble := self.trouble) is not None:
                    progress = replace(progress, error=progress.error or trouble)
            yield progress
            if progress.state.has_ended:
                return
            left = math.inf if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise JobTimeoutError(f"job {self.id} did not end in {timeout} s")
            time.sleep(min(pause, left))

    def wait(
        self, timeout: float | None = None, start_worker: bool = True, show_progress: bool | None = None
    ) -> Progress:
        """Until the job has ended; starts a worker for that time if its queue has none.

        `show_progress`: rows, rate and the time left on standard error, as `headrace run` has them; by default on a
        terminal and in a notebook. Raises `JobTimeoutError`, or `WorkerFailedError` when the worker can not run.
        """
        # Here, not above: a fifth of a second to import, which submitting needs not.
        from .display import JobDisplay, is_looked_at

        with ExitStack() as stack:
            workers = stack.enter_context(self.local_workers())
            display = None
            if is_looked_at() if show_progress is None else show_progress:
                display = stack.enter_context(JobDisplay(self, self.progress()))
            for progress in self.watch(timeout):
                if display is not None:
                    display.show(progress)
                if start_worker and progress.state is JobState.RUNNING:
                    workers.tick(progress.rows_done)
        return progress

    def local_workers(self, options: Sequence[str] = ()) -> LocalWorkers:
        """Workers for the job's queue, to be started if there is none; `options` are those of `headrace worker`."""
        return self.client.workers_for(self.record.queue, [*self.spec.worker_options, *options], self.id)

    @property
    def worker_command(self) -> str:
        """What starts a worker that answers the job, in a shell."""
        return shlex.join(["headrace", "worker", *self.spec.worker_options])

    @property
    def is_served(self) -> bool:
        """Whether a worker that has loaded its model listens to the job's queue."""
        return self.client.is_served(self.record.queue)

    @property
    def trouble(self) -> str | None:
        """Why no worker is heard of, where it is Redis that keeps the job waiting."""
        try:
            if not self.is_served:
                self.client.expect_room()
        except RedisError as error:
            return trouble_of(error)
        return None

    def cancel(self) -> None:
        """Stop the job for good; what is committed stays. Raises `JobEnded` when it has completed."""
        cancel_job(self.client.ledger, self.id)

    def pause(self) -> None:
        """Have no more rows begun until `resume`. Raises `JobEnded`."""
        self.client.ledger.pause_job(self.id)

    def resume(self) -> None:
        """Let a paused job go on. Raises `JobEnded`."""
        self.client.ring(self.record.queue, self.client.ledger.resume_job(self.id))

    def set_priority(self, priority: int) -> None:
        """Have its rows begun before those of jobs with a lower priority (default: 0).

        Raises `SpecError`, `JobEnded`.
        """
        self.client.ledger.set_priority(self.id, checked_priority(priority))

    def retry(self) -> None:
        """Try the failed rows of a completed job again, in the same data set. Raises `JobError`, `StorageError`."""
        self.client.ring(self.record.queue, retry_job(self.client.ledger, self.id))

    def delete(self, with_output: bool = False, ended_before: float | None = None) -> bool:
        """Forget the job, and with `with_output` remove its data set; one that has not ended is cancelled.

        With `ended_before`, in Unix seconds, only one that had ended by then and has not been tried again since;
        returns whether it was.
        """
        is_deleted = delete_job(self.client.ledger, self.client.jobs_folder, self.id, with_output, ended_before)
        if is_deleted:
            self.client.remove_logs(self.id)
        return is_deleted

    def results(self) -> pa.Table:
        """All rows committed so far, in the input's order.

        Raises `PartMissing` where some were removed since, as by a job that has replaced this one's data set.
        """
        finish_what_is_left(self.client.ledger, self.client.ledger.job(self.id))
        return read_results(self.client.ledger, self.record)
