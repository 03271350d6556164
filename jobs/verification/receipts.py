"""How a data set was made: what the ledger notes of its job, or its manifest where there is no such ledger."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds

from ...storage.errors import UnknownJob
from ...storage.ledger import Ledger
from ...storage.output_dir import read_report
from ...storage.records import DEFAULT_TENANT, JobRecord
from ..errors import NotVerifiable
from ..schemas import JobSpec


@dataclass(frozen=True)
class Receipt:
    """What is needed to make a job's rows again. `weights`: None where no worker has noted them."""

    job_id: str
    spec: JobSpec
    folder: Path
    weights: str | None
    tenant: str = DEFAULT_TENANT
    priority: int = 0

    @classmethod
    def find(cls, ledger: Ledger, name: str) -> Self:
        """That of a job's id or of an output folder.

        Raises `UnknownJob`, `StorageError`, or `NotVerifiable` when it is too little to go by.
        """
        folder = Path(name).absolute()
        return cls._of_folder(ledger, folder) if folder.is_dir() else cls._of_job(ledger.job(name))

    @classmethod
    def _of_folder(cls, ledger: Ledger, folder: Path) -> Self:
        report = read_report(folder)
        if report is None:
            raise NotVerifiable(f"folder {folder} holds no data set of headrace: name a job or its output folder")
        with suppress(UnknownJob):
            return cls._of_job(ledger.job(report["job_id"]), folder)
        return cls._of_report(report, folder)

    @classmethod
    def _of_job(cls, job: JobRecord, folder: Path | None = None) -> Self:
        spec = _checked(job.id, job.spec)
        return cls(job.id, spec, folder or Path(job.output_dir), job.weights, job.tenant, job.priority)

    @classmethod
    def _of_report(cls, report: dict[str, Any], folder: Path) -> Self:
        job_id = report["job_id"]
        if "options" not in report:
            raise NotVerifiable(
                f"job {job_id} of folder {folder} is not in this ledger, and had not completed: verify it with the "
                "HEADRACE_DATABASE_URL and HEADRACE_DATA_DIR that it was run with"
            )
        return cls(job_id, _checked(job_id, report["options"]), folder, report.get("weights"))

    def rows(self) -> ds.Dataset:
        """The rows that are there by now. Raises `NotVerifiable` when there is none."""
        files = sorted(str(path) for path in self.folder.glob("part-*.parquet"))
        if not files:
            raise NotVerifiable(f"folder {self.folder} holds no row of job {self.job_id} yet")
        try:
            return ds.dataset(files, format="parquet")
        except (OSError, pa.ArrowException) as error:
            raise NotVerifiable(f"folder {self.folder} cannot be read: {error}") from error


def _checked(job_id: str, options: dict[str, Any]) -> JobSpec:
    spec = JobSpec.model_validate(options)
    if spec.samples_each_row:
        raise NotVerifiable(f"job {job_id} is a batch's: how its rows were asked is in the batch's file, not with them")
    return spec
