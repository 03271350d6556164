"""What goes wrong between a user and the engine. Each message is one line that says what to do."""

from ..storage.errors import Argument, WordedError


class JobError(WordedError):
    """Base of what submitting, running and reading jobs raises on purpose."""


class SpecError(JobError, ValueError):
    """A job that can not be run as described: the message names the option, `field` its place in the description."""

    def __init__(self, *words: str | Argument, field: str | None = None) -> None:
        super().__init__(*words)
        self.field = field


class RowError(Exception):
    """A row that can not be asked; its neighbours are not affected. The message becomes the row's error."""


class LaterVersion(JobError):
    """A job, or a live request, asks for something that only a later version of ours knows."""


class JobMismatchError(JobError):
    """An output folder belongs to a job with another input or other options."""


class NotRetriable(JobError):
    """There is no row of the job to try again, or it has not completed."""


class NotVerifiable(JobError):
    """There is nothing of a job that could be made again and compared."""


class RowsGone(NotVerifiable):
    """There was something, and all its files were removed."""


class Stopped(JobError):
    """An attempt was told to end: the worker shuts down, or the lease is gone."""


class WorkerFailedError(JobError):
    """The workers started for a job keep dying without progress."""
