"""Jobs as the command line takes them: by their ids, or by the folders of their data sets."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ...storage.errors import UnknownJob
from ...storage.output.address import is_same_folder, open_folder
from ...storage.output.manifest import read_report
from ..errors import SpecError
from ..open_ledger import open_ledger
from ..settings import Settings

_HELP = "A job's id, as `headrace jobs` lists them, or its output folder."


def job_named(name: str) -> str:
    """Its id.

    Raises `SpecError` where a folder is no data set, that of another ledger's job, or one that was moved,
    `StorageError` where it is out of reach, `LedgerError`.
    """
    if "://" not in name and not Path(os.path.expanduser(name)).is_dir():
        return name
    folder = open_folder(name)
    if (report := read_report(folder)) is None:
        raise SpecError(f"folder {name} holds no data set of headrace: name a job or its output folder")
    job_id = str(report["job_id"])
    with open_ledger(Settings.from_environment()) as ledger:
        try:
            known = ledger.job(job_id).output_dir
        except UnknownJob as error:
            raise SpecError(
                f"folder {name} is of job {job_id}, which the ledger here does not have: unless it was deleted, set "
                "HEADRACE_DATA_DIR or HEADRACE_DATABASE_URL as it was then"
            ) from error
    if not is_same_folder(known, str(folder)):
        raise SpecError(f"folder {name} was moved or copied from {known}, where job {job_id} has it: name the job")
    return job_id


def jobs_named(names: list[str] | None) -> list[str] | None:
    """See `job_named`."""
    return names and [job_named(name) for name in names]


JobId = Annotated[str, typer.Argument(metavar="JOB|OUTPUT", help=_HELP, callback=job_named)]
JobIds = Annotated[list[str] | None, typer.Argument(metavar="JOB|OUTPUT", help=_HELP, callback=jobs_named)]
