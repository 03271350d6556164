"""What the command line says of an error, and with which status it ends."""

from dataclasses import dataclass
from typing import Any, cast

import typer
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError, ResponseError

from ...engine.errors import EngineError
from ...storage.errors import LedgerUnavailable, SinkError, StorageError
from ..broker.redis_access import refusal
from ..embedded.valkey import EmbeddedValkeyError
from ..errors import JobError, RowsGone, WorkerFailedError
from ..settings import SettingsError
from ..streams.keys import StreamIdError
from .wording import with_options

_REFUSED, _FAILED = 2, 1
# What a command line that cannot be parsed raises: typer exports none of it but this child.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)


@dataclass(frozen=True)
class Failure:
    """One line for the user, and the exit status: 1 failed on the way, 2 refused before any work."""

    message: str
    status: int


def as_failure(error: Exception) -> Failure | None:
    """None for one that is a fault of ours."""
    match error:
        case _UsageError():
            return Failure(_usage_problem(error), _REFUSED)
        case SinkError():
            # Also where it does not answer: a job is submitted with it or not at all.
            return Failure(with_options(error), _REFUSED)
        case LedgerUnavailable() | WorkerFailedError() | EmbeddedValkeyError() | RowsGone():
            return Failure(str(error), _FAILED)
        case RedisError() | OperationalError():
            if (refused := refusal(error)) is not None:
                return Failure(str(refused), _REFUSED)
            # Such as one whose memory is full.
            what = "refuses" if isinstance(error, ResponseError) else "does not answer"
            return Failure(f"Redis {what}: {error}", _FAILED)
        case EngineError() | JobError() | StorageError() | SettingsError() | StreamIdError():
            return Failure(with_options(error), _REFUSED)
        case OSError():
            # A disk that is full, a folder that may not be read: nothing that a traceback would explain.
            where = f"{error.filename}: " if error.filename else ""
            return Failure(where + (error.strerror or str(error) or type(error).__name__), _FAILED)
        case _:
            return None


def _usage_problem(error: Any) -> str:
    """Click's words in one line, and where to read more."""
    command = error.ctx.command_path if error.ctx else "headrace"
    # Pydantic's words before ours.
    problem = error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{problem}: see `{command} --help`"
