"""`headrace watch`: jobs on their way to the end."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...storage.errors import LedgerUnavailable, UnknownJob
from ...storage.ledger.records import JobState, Progress
from ..client.client import Client
from ..client.display import behind, can_redraw, duration, print_line, rate_of
from .follow import exit_status, follow, opening
from .job_names import JobIds
from .tables import print_table

_REFRESH_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_HEADING = ("JOB", "STATE", "ROWS", "FAILED", "ROWS/S", "ETA", "WAITS FOR")


def watch(job_ids: JobIds = None) -> None:
    """Show a job's way until it has ended.

    Several are shown in a table; without JOB all that run. The exit status is that of `headrace run`:
    with several, 1 if it were so for one of them.
    """
    with Client() as client:
        if job_ids is not None and len(job_ids) == 1:
            job = client.job(job_ids[0])
            first = job.progress()
            typer.echo(opening(job, first), err=True)
            status = follow(client, job, first, lambda progress: None)
        else:
            status = _watch_all(_Watched(client, job_ids or ()))
    raise typer.Exit(status)


class _Watched:
    """Some jobs, or with none named all that run or come to run meanwhile."""

    def __init__(self, client: Client, job_ids: Sequence[str]) -> None:
        """Raises `UnknownJob`."""
        self._client = client
        self._overview = client.ledger.overview
        self._has_names = bool(job_ids)
        self._job_ids = [client.job(job_id).id for job_id in dict.fromkeys(job_ids)]
        self.progresses: list[Progress] = []

    @property
    def have_ended(self) -> bool:
        return all(progress.state.has_ended for progress in self.progresses)

    def read(self) -> None:
        """Ask the ledger. Raises `LedgerError`."""
        if not self._has_names:
            opened = [job.id for job in reversed(self._overview.open_jobs())]
            self._job_ids = list(dict.fromkeys((*self._job_ids, *opened)))
        progresses = []
        for job_id in self._job_ids:
            # One may be deleted meanwhile.
            with suppress(UnknownJob):
                progresses.append(self._client.ledger.progress(job_id))
        self.progresses = progresses

    def lines(self) -> list[tuple[str, ...]]:
        """As `_HEADING` has it. Raises `LedgerError`."""
        return [self._line(progress) for progress in self.progresses]

    def _line(self, progress: Progress) -> tuple[str, ...]:
        rows = f"{progress.rows_done:,}/{progress.rows_total:,}"
        rate = None
        if not progress.state.has_ended:
            with suppress(UnknownJob):
                rate = self._overview.recent_rows_per_second(progress.job_id)
        left = duration((progress.rows_total - progress.rows_done) / rate) if rate else "-"
        pace = rate_of(rate) if rate else "-"
        words = (rows, f"{progress.rows_failed:,}", pace, left, self._waits_for(progress))
        return (progress.job_id, str(progress.state), *words)

    def _waits_for(self, progress: Progress) -> str:
        """In words, nothing where it does not."""
        if progress.error:
            return progress.error
        if (ahead := self._overview.ahead_of(progress.job_id)) is not None:
            return behind(ahead)
        if progress.state is JobState.RUNNING:
            job = self._client.job(progress.job_id)
            if not job.is_served:
                return job.trouble or f"a worker: {job.worker_command}"
        return ""


def _watch_all(watched: _Watched) -> int:
    watched.read()
    if not watched.progresses:
        typer.echo("no job is running")
        return 0
    with _shown() as display:
        display.show(watched.lines())
        while not watched.have_ended:
            time.sleep(_REFRESH_SECONDS)
            # What was shown last stays.
            with suppress(LedgerUnavailable):
                watched.read()
                display.show(watched.lines())
    print_table(_HEADING[:4], [line[:4] for line in watched.lines()])
    return max(map(exit_status, watched.progresses), default=0)


class _Display:
    """A table on a terminal, lines every few seconds elsewhere; on standard error."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._printed_at: float | None = None

    def show(self, lines: Sequence[Sequence[str]]) -> None:
        if self._live is not None:
            table = Table(*_HEADING, box=None, pad_edge=False)
            for line in lines:
                table.add_row(*line)
            self._live.update(table, refresh=True)
        elif self._printed_at is None or time.monotonic() - self._printed_at > _PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            for line in lines:
                print_line("  ".join(line).rstrip())


@contextmanager
def _shown() -> Iterator[_Display]:
    # An error's brackets are no styles.
    console = Console(stderr=True, markup=False)
    if not can_redraw(console):
        yield _Display(None)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Display(live)
