"""How the rows of a data set come back whose files were removed."""

from pathlib import Path

from ...storage.ledger.records import JobRecord, JobState
from ..settings import Settings


def way_back(job: JobRecord, settings: Settings) -> str | None:
    """What does so, in the user's words; None of a job that no `run` has asked for, but a batch, or over HTTP."""
    if Path(job.output_dir).is_relative_to(settings.outputs_folder):
        return None
    return "--overwrite runs all again" if job.state is JobState.CANCELLED else "run --resume makes them again"
