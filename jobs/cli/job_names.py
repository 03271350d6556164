"""Jobs as the command line takes them: by their ids, or by the folders of their data sets."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ...storage.output_address import open_folder
from ...storage.output_dir import read_report
from ..errors import SpecError

_HELP = "A job's id, as `headrace jobs` lists them, or its output folder."


def job_named(name: str) -> str:
    """Its id. Raises `SpecError` where a folder is no data set, and `StorageError` where it is out of reach."""
    if "://" not in name and not Path(os.path.expanduser(name)).is_dir():
        return name
    report = read_report(open_folder(name))
    if report is None:
        raise SpecError(f"folder {name} holds no data set of headrace: name a job or its output folder")
    return str(report["job_id"])


def jobs_named(names: list[str] | None) -> list[str] | None:
    """See `job_named`."""
    return names and [job_named(name) for name in names]


JobId = Annotated[str, typer.Argument(metavar="JOB|OUTPUT", help=_HELP, callback=job_named)]
JobIds = Annotated[list[str] | None, typer.Argument(metavar="JOB|OUTPUT", help=_HELP, callback=jobs_named)]
