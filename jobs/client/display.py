"""What is shown of a job on its way: by `headrace run` and `watch`, and by `Job.wait`."""

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from ...storage.errors import LedgerUnavailable
from ...storage.ledger.overview import Ahead
from ...storage.ledger.records import JobState, Progress

if TYPE_CHECKING:
    from .job import Job

_PLAIN_LINE_SECONDS = 5.0
# Most models are loaded by then.
_LONG_SECONDS = 60.0


@dataclass
class Pace:
    """How fast a run goes, measured from the moment a worker was ready. Rows kept from before do not count.

    `log`: what the worker says that was started for the job, if one was.
    """

    first: Progress
    log: Path | None = None
    started_at: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    waited_until: float | None = None
    ended_at: float | None = None

    def worker_is_ready(self) -> None:
        self.ready_at = self.ready_at or time.monotonic()

    def waits(self) -> None:
        """No worker is there for the job, or all are at another's rows."""
        self.waited_until = time.monotonic()

    def end(self) -> None:
        """The job has ended: what follows is not its time. It may have done so before it was seen at work."""
        self.ended_at = time.monotonic()
        self.ready_at = self.ready_at or self.waited_until

    def was_over(self, seconds: float) -> None:
        """The job had ended before anybody looked, so long after it was submitted."""
        self.ended_at = self.started_at
        self.started_at = self.ready_at = self.ended_at - seconds

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._now - self.started_at

    @property
    def working_seconds(self) -> float:
        return self._now - self.ready_at if self.ready_at is not None else 0.0

    @property
    def _now(self) -> float:
        return self.ended_at if self.ended_at is not None else time.monotonic()

    def rows_ended(self, now: Progress) -> int:
        """In this run. Rows that have failed are done: of a retry those count that have failed no more."""
        return now.rows_done - self.first.rows_done + max(0, self.first.rows_failed - now.rows_failed)

    def rows_per_second(self, now: Progress) -> float:
        return self.rate_of(self.rows_ended(now))

    def tokens_per_second(self, now: Progress) -> float:
        """Prompt and completion tokens of the rows finished in this run, cached ones included."""
        return self.rate_of(_tokens(now) - _tokens(self.first))

    def hit_rate(self, now: Progress) -> float:
        """Share of this run's prompt tokens whose KV came from the prefix cache."""
        prompt = now.prompt_tokens - self.first.prompt_tokens
        return (now.cached_tokens - self.first.cached_tokens) / prompt if prompt else 0.0

    def eta_seconds(self, now: Progress) -> float | None:
        rate = self.rows_per_second(now)
        return (now.rows_total - now.rows_done or now.rows_failed) / rate if rate else None

    def rate_of(self, count: int) -> float:
        return count / self.working_seconds if self.working_seconds else 0.0


def _tokens(progress: Progress) -> int:
    return progress.prompt_tokens + progress.completion_tokens


class RunDisplay:
    """A live bar on a terminal, a line in a notebook, one every few seconds elsewhere.

    On standard error, which stays clear of results.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._printed_at = time.monotonic()
        console = Console(stderr=True)
        # rich's own needs widgets there.
        self._line = OneLine() if console.is_jupyter else None
        self._bar: ProgressBar | None = None
        self._task = TaskID(0)
        if can_redraw(console):
            self._bar = ProgressBar(
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                # An error's brackets are no styles.
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("rows", total=self._pace.first.rows_total, figures="waiting for a worker")
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._line is not None:
            self._line.end()

    def show(self, progress: Progress, ahead: Ahead | None = None) -> None:
        """`ahead`: the job that this one waits for."""
        figures = self._figures(progress, ahead)
        line = f"{progress.rows_done:,}/{progress.rows_total:,} rows  {figures}"
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.rows_done, figures=figures)
        elif self._line is not None:
            self._line.show(line)
        elif time.monotonic() - self._printed_at > _PLAIN_LINE_SECONDS:
            self._printed_at = time.monotonic()
            print_line(line)

    def _figures(self, progress: Progress, ahead: Ahead | None) -> str:
        pace = self._pace
        if progress.state is JobState.PAUSED:
            reason = f"; failed last: {progress.error}" if progress.error else ""
            return f"paused: headrace resume {progress.job_id}{reason}"
        if progress.error:
            return f"waiting: {progress.error}"
        if ahead is not None:
            return f"waiting {behind(ahead)}"
        if pace.ready_at is None and progress.state.has_ended:
            return str(progress.state)
        if pace.ready_at is None:
            return f"waiting for a worker{self._where_it_says_why()}"
        if not pace.rows_ended(progress):
            # Rates of what has ended would be zero, however much is under way.
            return f"no row has ended yet, after {duration(pace.working_seconds)} with the model loaded"
        eta = pace.eta_seconds(progress)
        return (
            f"{rate_of(pace.rows_per_second(progress))} rows/s  {pace.tokens_per_second(progress):,.0f} tokens/s  "
            f"{pace.hit_rate(progress):.0%} cached  {_reused(progress)}"
            f"ETA {duration(eta) if eta is not None else '-'}"
        )

    def _where_it_says_why(self) -> str:
        pace = self._pace
        if pace.seconds < _LONG_SECONDS or pace.log is None or not pace.log.exists():
            return ""
        return f", for {duration(pace.seconds)}: what it is at is in {pace.log}"


class OneLine:
    """A line of standard error that is written anew in its place."""

    def __init__(self) -> None:
        self._length = 0

    def show(self, line: str) -> None:
        # Of a longer one before, the end would stay.
        with suppress(OSError):
            print(f"\r{line.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(line)

    def end(self) -> None:
        print_line("")


def is_looked_at() -> bool:
    """Whether standard error is where a line can be shown anew."""
    console = Console(stderr=True)
    return can_redraw(console) or console.is_jupyter


class JobDisplay:
    """A job's way to its end. A context manager, for whoever goes through `Job.watch`."""

    def __init__(self, job: "Job", first: Progress) -> None:
        """What was done at `first` is from before."""
        self.pace = Pace(first, job.client.log_of(job.id))
        self._job = job
        self._display = RunDisplay(self.pace)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._display.__exit__(*exc_info)

    def show(self, progress: Progress) -> None:
        ahead = self._ahead()
        if progress.state is JobState.RUNNING and self.pace.ready_at is None:
            if ahead is None and self._job.is_served:
                self.pace.worker_is_ready()
            else:
                self.pace.waits()
        elif progress.state.has_ended:
            self.pace.end()
            if self.pace.ready_at is None and not self.pace.first.state.has_ended:
                record = self._job.client.ledger.job(self._job.id)
                self.pace.was_over((record.finished_at or record.created_at) - record.created_at)
        self._display.show(progress, ahead)

    def _ahead(self) -> Ahead | None:
        # What can not be known now is not shown.
        with suppress(LedgerUnavailable):
            return self._job.client.ledger.overview.ahead_of(self._job.id)
        return None


def rate_of(rows_per_second: float, decimals: int = 0) -> str:
    """With two digits at least: a large model may take seconds a row."""
    return f"{rows_per_second:,.{decimals}f}" if rows_per_second >= 10 else f"{rows_per_second:.2g}"


def print_line(line: str) -> None:
    """Onto standard error. A log that takes nothing, its disk being full or its reader gone, costs lines, not a run."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _reused(progress: Progress) -> str:
    return f"{progress.rows_from_cache:,} rows from the result cache  " if progress.rows_from_cache else ""


def behind(ahead: Ahead) -> str:
    left = counted(ahead.rows_left, "row")
    return f"behind {ahead.job_id} ({left} left; `headrace cancel {ahead.job_id}` drops it)"


def can_redraw(console: Console) -> bool:
    """Whether what is shown can be shown again in its place: not in a file, and not in an editor's shell."""
    return console.is_terminal and not console.is_dumb_terminal


def counted(count: int, noun: str) -> str:
    """A count with its noun in the right number."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """As `4:07`, or `1:04:07`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
