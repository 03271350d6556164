"""`headrace dry-run`: what a job would be, without running it."""

import tempfile
from pathlib import Path

import typer

from ..planning.dry_run import Forecast, forecast
from ..settings import Settings
from .display import counted
from .job_options import Asked, asked
from .signatures import takes


@takes(asked)
def dry_run(asked: Asked) -> None:
    """Plan every row of INPUT and say what running it would mean: rows at fault, tokens, shared prefixes, fit."""
    settings = Settings.from_environment()
    # The only thing that is written, and only for as long as it takes.
    with tempfile.TemporaryDirectory(prefix="headrace-dry-run-") as folder, asked.open_source(Path(folder)) as source:
        found = forecast(source, asked.spec, settings.shard_rows, Path(folder))
    for name, value in _lines(found, asked.spec.sampling.max_tokens):
        typer.echo(f"{name:<16}{value}")


def _lines(found: Forecast, max_tokens: int) -> list[tuple[str, str]]:
    tokens, longest = found.sharing.prompt_tokens, found.largest_prompt
    return [
        ("rows", f"{found.num_rows}, {found.num_errors} at fault, in {counted(found.num_shards, 'shard')}"),
        ("prompt tokens", f"{tokens:,}, {longest:,} in the largest prompt"),
        (
            "in prefixes",
            f"{_share(found.sharing.shared_tokens, tokens)}, ideal {_share(found.sharing.shareable_tokens, tokens)}",
        ),
        ("context", _fit(found.context_tokens, longest, max_tokens)),
        ("KV memory", f"{_fit(found.kv_tokens, longest, max_tokens)} (by default, in {found.dtype})"),
        *((f"row {row}", error) for row, error in found.errors),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.1%}"


def _fit(capacity: int, longest: int, max_tokens: int) -> str:
    """Whether the largest prompt has room, and its longest answer beside it."""
    if longest >= capacity:
        return f"{capacity:,} tokens: the largest prompt does not fit"
    if longest + max_tokens > capacity:
        return f"{capacity:,} tokens: the largest prompt's answer may be cut at {capacity - longest:,} tokens"
    return f"{capacity:,} tokens: all fit"
