"""Which commands there are, and how their errors reach the user: one line, exit status 2 or 1, no traceback."""

import logging
import sys
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from ...engine.errors import EngineError
from ...storage.errors import LedgerUnavailable, SinkError, StorageError
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import JobError, WorkerFailedError
from ..redis_access import refusal
from ..settings import SettingsError
from ..streams.keys import StreamIdError
from . import delete, dry_run, inspect, queues, run, serve, size, stream, up, verbs, verify, watch, worker
from .keys import keys
from .option_groups import GroupedCommand
from .tenants import tenants
from .wording import with_options

_REFUSED, _FAILED, _INTERRUPTED = 2, 1, 130
# What a command line that cannot be parsed raises: typer exports none of it but this child.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

app = typer.Typer(
    name="headrace",
    help="Batch prompts through your own GPUs: a file in, a Parquet data set out, each row exactly once.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", cls=GroupedCommand)(run.run)
app.command("submit", cls=GroupedCommand)(run.submit)
app.command("dry-run", cls=GroupedCommand)(dry_run.dry_run)
app.command("size", cls=GroupedCommand)(size.size)
app.command("watch")(watch.watch)
app.command("jobs")(inspect.jobs)
app.command("queues")(queues.queues)
app.command("show")(inspect.show)
app.command("results")(inspect.results)
app.command("verify", cls=GroupedCommand)(verify.verify)
app.command("pause")(verbs.pause)
app.command("resume")(verbs.resume)
app.command("cancel")(verbs.cancel)
app.command("priority", context_settings={"ignore_unknown_options": True})(verbs.priority)
app.command("retry")(verbs.retry)
app.command("delete")(delete.delete)
app.command("stream")(stream.stream)
app.command("worker", cls=GroupedCommand)(worker.worker)
app.command("serve", cls=GroupedCommand)(serve.serve)
app.command("up", cls=GroupedCommand)(up.up)
app.add_typer(keys)
app.add_typer(tenants)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Set up what all commands share."""


def main() -> None:
    """The `headrace` command. Exit status: 0 done, 1 failed on the way, 2 refused before any work, 130 interrupted."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="headrace", standalone_mode=False))
    except _UsageError as error:
        _exit(_usage_problem(error), _REFUSED)
    except SinkError as error:
        # Also where it does not answer: a job is submitted with it or not at all.
        _exit(with_options(error), _REFUSED)
    except (LedgerUnavailable, WorkerFailedError, EmbeddedValkeyError) as error:
        _exit(error, _FAILED)
    except (RedisError, OperationalError) as error:
        if (refused := refusal(error)) is not None:
            _exit(refused, _REFUSED)
        _exit(f"Redis does not answer: {error}", _FAILED)
    except (EngineError, JobError, StorageError, SettingsError, StreamIdError) as error:
        _exit(with_options(error), _REFUSED)
    except OSError as error:
        # A disk that is full, a folder that may not be read: nothing that a traceback would explain.
        where = f"{error.filename}: " if error.filename else ""
        _exit(where + (error.strerror or str(error) or type(error).__name__), _FAILED)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _usage_problem(error: Any) -> str:
    """Click's words in one line, and where to read more."""
    command = error.ctx.command_path if error.ctx else "headrace"
    # Pydantic's words before ours.
    problem = error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{problem}: see `{command} --help`"


def _exit(message: object, status: int) -> None:
    typer.echo(f"headrace: {message}", err=True)
    sys.exit(status)
