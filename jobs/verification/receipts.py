"""How a data set was made: what the ledger notes of its job, or its manifest where there is no such ledger."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds

from ...storage.errors import UnknownJob
from ...storage.ledger import Ledger
from ...storage.output_address import open_folder
from ...storage.output_dir import read_report
from ...storage.output_folder import OutputFolder
from ...storage.records import DEFAULT_TENANT, JobRecord
from ..errors import NotVerifiable
from ..schemas import JobSpec

# As the API names batches.
_BATCH_PREFIX = "batch_"


@dataclass(frozen=True)
class Receipt:
    """What is needed to make a job's rows again. `weights`: None where no worker has noted them."""

    job_id: str
    spec: JobSpec
    folder: OutputFolder
    part_names: tuple[str, ...]
    weights: str | None
    tenant: str = DEFAULT_TENANT
    priority: int = 0

    @classmethod
    def find(cls, ledger: Ledger, name: str) -> Self:
        """That of a job's id or of an output folder.

        Raises `UnknownJob`, `StorageError`, or `NotVerifiable` when it is too little to go by.
        """
        if name.startswith(_BATCH_PREFIX):
            raise _is_a_batch(name)
        is_folder = "://" in name or Path(name).is_dir()
        return cls._of_folder(ledger, open_folder(name)) if is_folder else cls._of_job(ledger, ledger.job(name))

    @classmethod
    def _of_folder(cls, ledger: Ledger, folder: OutputFolder) -> Self:
        report = read_report(folder)
        if report is None:
            raise NotVerifiable(f"folder {folder} holds no data set of headrace: name a job or its output folder")
        with suppress(UnknownJob):
            return cls._of_job(ledger, ledger.job(report["job_id"]), folder)
        return cls._of_report(report, folder)

    @classmethod
    def _of_job(cls, ledger: Ledger, job: JobRecord, folder: OutputFolder | None = None) -> Self:
        own = open_folder(job.output_dir)
        folder = folder or own
        # Of a copy the ledger knows no parts.
        parts = [part.file_name for part in ledger.parts(job.id)] if folder == own else folder.part_names()
        spec = _checked(job.id, job.spec)
        return cls(job.id, spec, folder, tuple(parts), job.weights, job.tenant, job.priority)

    @classmethod
    def _of_report(cls, report: dict[str, Any], folder: OutputFolder) -> Self:
        job_id = report["job_id"]
        if "options" not in report:
            raise NotVerifiable(
                f"job {job_id} of folder {folder} is not in this ledger, and had not completed: verify it with the "
                "HEADRACE_DATABASE_URL and HEADRACE_DATA_DIR that it was run with"
            )
        parts = tuple(folder.part_names())
        return cls(job_id, _checked(job_id, report["options"]), folder, parts, report.get("weights"))

    def rows(self) -> ds.Dataset:
        """The rows that are there by now. Raises `NotVerifiable` when there is none."""
        try:
            rows = self.folder.dataset(sorted(self.part_names))
        except (OSError, pa.ArrowException) as error:
            raise NotVerifiable(f"folder {self.folder} cannot be read: {error}") from error
        if not rows.files:
            raise NotVerifiable(f"folder {self.folder} holds no row of job {self.job_id} yet")
        return rows


def _checked(job_id: str, options: dict[str, Any]) -> JobSpec:
    spec = JobSpec.model_validate(options)
    if spec.samples_each_row:
        raise _is_a_batch(f"job {job_id}")
    return spec


def _is_a_batch(name: str) -> NotVerifiable:
    return NotVerifiable(
        f"{name} is a batch's: how its rows were asked is in the batch's input file, not with them; to compare, send "
        "lines of that file again"
    )
