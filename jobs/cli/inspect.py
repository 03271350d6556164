"""`headrace show` and `results`: what the ledger and the data set say of a job."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from ...storage.files import write_lines
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import DEFAULT_TENANT, JobRecord, Progress
from ...storage.output.sinks import SinkSpec
from ..client.display import counted
from ..open_ledger import open_ledger
from ..results.json_lines import json_rows, openai_lines
from ..results.row_index import RowIndex
from ..results.stored_results import num_readable, sorted_lines
from ..settings import Settings
from ..shards.finishing import finish_what_is_left
from .cost import GpuHourPrice, cost
from .job_names import JobId
from .json_jobs import json_job
from .keys import AsJson
from .tables import time_text
from .way_back import way_back

_MAX_SHOWN = 400


class ResultFormat(StrEnum):
    JSONL = "jsonl"
    OPENAI = "openai"


def show(job_id: JobId, gpu_hour_price: GpuHourPrice = None, as_json: AsJson = False) -> None:
    """Show one job: its state, counts and options."""
    with open_ledger(Settings.from_environment()) as ledger:
        job = ledger.job(job_id)
        finish_what_is_left(ledger, job)
        if as_json:
            typer.echo(json.dumps(json_job(ledger, ledger.job(job_id))))
            return
        lines = _description(job, ledger.progress(job_id), gpu_hour_price)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        typer.echo(f"{name:<{width}}  {value}")


def results(
    job_id: JobId,
    head: Annotated[int | None, typer.Option("--head", min=1, help="Only the first N rows.")] = None,
    format: Annotated[
        ResultFormat, typer.Option("--format", help="jsonl has the data set's columns, openai is a batch's output.")
    ] = ResultFormat.JSONL,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write into this file.")] = None,
) -> None:
    """Print a job's rows as JSON lines, in the input's order.

    While it runs those that are committed so far.
    """
    settings = Settings.from_environment()
    with open_ledger(settings) as ledger:
        job = ledger.job(job_id)
        finish_what_is_left(ledger, job)
        progress = ledger.progress(job_id)
        to_lines = partial(_lines, job, format)
        with _texts(ledger, job, head, settings.data_dir, to_lines) as texts:
            if output is not None:
                write_lines(output, texts)
            else:
                for text in texts:
                    typer.echo(text)
        num_rows = num_readable(ledger, job)
    _say_what_is_gone(job, progress, num_rows, settings)


def _lines(job: JobRecord, format: ResultFormat, table: pa.Table) -> Iterator[str]:
    rows = openai_lines(job, table) if format is ResultFormat.OPENAI else json_rows(table)
    return (json.dumps(row, ensure_ascii=False, default=str) for row in rows)


def _texts(
    ledger: Ledger, job: JobRecord, head: int | None, data_dir: Path, to_lines: Callable[[pa.Table], Iterator[str]]
) -> AbstractContextManager[Iterator[str]]:
    if head is None:
        return sorted_lines(ledger, job, data_dir, to_lines)
    return nullcontext(to_lines(RowIndex().first_rows(ledger, job, head).table))


def _say_what_is_gone(job: JobRecord, progress: Progress, num_rows: int, settings: Settings) -> None:
    """Exit with status 1 where the data set has fewer rows than were committed: its files were removed."""
    if num_rows < progress.rows_done:
        gone = counted(progress.rows_done - num_rows, "row")
        problem = f"{gone} of {progress.rows_done:,} can no longer be read in {job.output_dir}"
        advice = way_back(job, settings)
        typer.echo(f"headrace: {problem}" + (f": {advice}" if advice else ""), err=True)
        raise typer.Exit(1)


def _description(job: JobRecord, progress: Progress, price: float | None) -> list[tuple[str, str]]:
    cached = progress.cached_tokens / progress.prompt_tokens if progress.prompt_tokens else 0.0
    fields = [
        ("job", job.id),
        ("state", str(job.state)),
        ("rows", f"{progress.rows_done:,} of {progress.rows_total:,} ({_kinds(progress)})"),
        ("shards", f"{progress.shards_done:,} of {progress.shards_total:,}"),
        (
            "tokens",
            f"{progress.prompt_tokens:,} prompt ({cached:.1%} cached), {progress.completion_tokens:,} completion",
        ),
        *([("tenant", job.tenant)] if job.tenant != DEFAULT_TENANT else []),
        *([("priority", str(job.priority))] if job.priority else []),
        ("created", time_text(job.created_at)),
        *([("deadline", time_text(job.deadline_at))] if job.deadline_at is not None else []),
        ("finished", time_text(job.finished_at) if job.finished_at is not None else "-"),
        *([("cost", _cost(price, job, progress))] if price is not None else []),
        ("output", job.output_dir),
        *(("weights", weights) for weights in job.all_weights),
        *([("sink", str(SinkSpec.of(job.sink)))] if job.sink is not None else []),
    ]
    options = [(name, _clipped(value)) for name, value in job.spec.items() if value is not None]
    errors = [("error", progress.error)] if progress.error else []
    return [*fields, *options, *errors]


def _cost(price: float, job: JobRecord, progress: Progress) -> str:
    if job.started_at is None or job.finished_at is None:
        return "not known before it has ended"
    return cost(price, job.finished_at - job.started_at, progress.prompt_tokens, progress.completion_tokens)


def _kinds(progress: Progress) -> str:
    cached = f", {progress.rows_from_cache:,} from the result cache" if progress.rows_from_cache else ""
    truncated = f", {progress.rows_truncated:,} truncated" if progress.rows_truncated else ""
    return f"{progress.rows_failed:,} failed{cached}{truncated}"


def _clipped(value: Any) -> str:
    """As JSON; the end of a long system text is left out."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
