"""`headrace dry-run`: what a job would be, without running it."""

import tempfile
from pathlib import Path

import typer

from ...engine.config import EngineConfig
from ...storage.database import Database
from ...storage.errors import LedgerError
from ...storage.ledger.overview import Overview, Pace
from ..client.display import counted, duration
from ..planning.dry_run import Forecast, forecast
from ..settings import Settings
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored
from .advice import sampling_advice
from .cost import GpuHourPrice, cost
from .job_options import JobAsked, asked
from .options import data_parallel_size, engine_config, watchdog_seconds
from .reading import shown_reading
from .signatures import takes
from .target_options import PossibleOutput, Target, target

_UNKNOWN = "not known before a job with this model has completed"


@takes(asked, target, engine_config, watchdog_seconds, data_parallel_size)
def dry_run(
    asked: JobAsked,
    _target: Target,
    engine: EngineConfig,
    _watchdog: float,
    num_workers: int,
    output: PossibleOutput = None,
    gpu_hour_price: GpuHourPrice = None,
) -> None:
    """Say what running INPUT would be: rows, tokens, time.

    Takes the options of `run`, and writes nothing. Plans every row: rows at fault, shared prefixes, whether all fit.
    The time is what an earlier job's pace makes it, however many workers and GPUs had the model then.
    """
    settings = Settings.from_environment()
    # The only thing that is written, and only for as long as it takes.
    with (
        tempfile.TemporaryDirectory(prefix="headrace-dry-run-") as folder,
        asked.open_source(Path(folder)) as source,
        shown_reading(source),
    ):
        found = forecast(source, asked.spec, settings.shard_rows, Path(folder), engine, num_workers)
    pace = _pace(settings, found.queue)
    for name, value in described(found, asked.spec, pace, gpu_hour_price):
        typer.echo(f"{name:<16}{value}")


def _pace(settings: Settings, queue: str) -> Pace | None:
    """How fast jobs like it have gone; None where nobody knows. Makes no ledger where there is none."""
    try:
        database = Database(settings.database_url)
        if database.is_sqlite and not Path(str(database.url.database)).is_file():
            return None
        return Overview(database).pace(queue)
    # It is only for an estimate: one of an older headrace is not brought up to date here either.
    except LedgerError:
        return None


def described(found: Forecast, spec: JobSpec, pace: Pace | None, price: float | None) -> list[tuple[str, str]]:
    """Each line's name and text."""
    max_tokens = found.answer_tokens
    tokens, longest = found.sharing.prompt_tokens, found.largest_prompt
    return [
        ("rows", f"{found.num_rows:,}, {found.num_errors:,} at fault, in {counted(found.num_shards, 'shard')}"),
        ("prompt tokens", f"{tokens:,}, {longest:,} in the largest prompt"),
        (
            "in prefixes",
            f"{_share(found.sharing.shared_tokens, tokens)}, ideal {_share(found.sharing.shareable_tokens, tokens)}",
        ),
        ("context", _fit(found.context_tokens, longest, max_tokens)),
        ("KV memory", f"{_fit(found.kv_tokens, longest, max_tokens)} ({_where(found)})"),
        ("sampling", _sampling(spec)),
        ("time", _time(found, spec, pace)),
        *([("cost", _cost(price, found, spec, pace))] if price is not None else []),
        *((f"row {row}", error) for row, error in found.errors),
    ]


def _sampling(spec: JobSpec) -> str:
    sampling = spec.sampling
    if sampling.temperature > 0:
        return f"temperature {sampling.temperature:g}"
    advice = sampling_advice(spec) if spec.choices is None or sampling.reasoning else None
    return "greedy" if advice is None else f"greedy; the model's authors advise {advice}"


def _time(found: Forecast, spec: JobSpec, pace: Pace | None) -> str:
    if pace is None:
        return _UNKNOWN
    seconds = _seconds(found, spec, pace)
    return f"{_roughly(spec)} {duration(seconds)} at the pace of {pace.job_id} ({pace.tokens_per_second:,.0f} tokens/s)"


def _cost(price: float, found: Forecast, spec: JobSpec, pace: Pace | None) -> str:
    if pace is None:
        return _UNKNOWN
    tokens = (found.sharing.prompt_tokens, _answer_tokens(found, spec, pace))
    return f"{_roughly(spec)} {cost(price, _seconds(found, spec, pace), *tokens)}"


def _roughly(spec: JobSpec) -> str:
    """A vote asks no further once the rest cannot change it: how soon that is depends on the answers."""
    return "up to" if spec.vote and spec.num_answers > 1 else "about"


def _seconds(found: Forecast, spec: JobSpec, pace: Pace) -> float:
    """As long as the tokens take that the prefix cache does not spare, at the pace of an earlier job."""
    prompts = found.sharing.prompt_tokens - found.sharing.shared_tokens
    return (prompts + _answer_tokens(found, spec, pace)) / pace.tokens_per_second


def _answer_tokens(found: Forecast, spec: JobSpec, pace: Pace) -> float:
    """As many an answer as in the earlier job, as far as this one's may come to that."""
    each = pace.tokens_per_row / read_stored(JobSpec, pace.spec).num_answers
    return (found.num_rows - found.num_errors) * spec.num_answers * min(found.answer_tokens, each)


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.1%}"


def _where(found: Forecast) -> str:
    how = "by default, " if found.is_kv_default else ""
    each = f", in each of {found.num_processes} processes" if found.num_processes > 1 else ""
    return f"{how}in {found.dtype}{each}"


def _fit(capacity: int, longest: int, max_tokens: int) -> str:
    """Whether the largest prompt has room, and its longest answer beside it."""
    if longest >= capacity:
        return f"{capacity:,} tokens: the largest prompt does not fit"
    if longest + max_tokens > capacity:
        return f"{capacity:,} tokens: the largest prompt's answer may be cut at {capacity - longest:,} tokens"
    return f"{capacity:,} tokens: all fit"
