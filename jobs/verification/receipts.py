"""How a data set was made: what the ledger notes of its job, or its manifest where there is no such ledger."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ...storage.errors import UnknownBatch, UnknownJob
from ...storage.ledger.batch_records import BatchRecord
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import DEFAULT_TENANT, JobRecord
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from ...storage.output.manifest import read_report
from ...storage.output.part_groups import PartGroups
from ..errors import NotVerifiable, RowsGone
from ..spec.schemas import JobSpec
from ..spec.stored import read_stored

# As the API names batches.
_BATCH_PREFIX = "batch_"


@dataclass(frozen=True)
class Receipt:
    """What is needed to make a job's rows again. `weights`: None where no worker has noted them.

    `batch`: the one whose rows they are, in whose input file each says for itself how it is asked. `num_rows`: how many
    there are to be at least; None where nobody has counted them.
    """

    job_id: str
    spec: JobSpec
    folder: OutputFolder
    part_names: tuple[str, ...]
    weights: str | None
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    batch: BatchRecord | None = None
    # None where no ledger knows which parts there are by now.
    names_now: Callable[[], list[str]] | None = None
    num_rows: int | None = None

    @classmethod
    def find(cls, ledger: Ledger, name: str) -> Self:
        """That of a job's or a batch's id, or of an output folder.

        Raises `UnknownJob`, `UnknownBatch`, `StorageError`, or `NotVerifiable` when it is too little to go by.
        """
        if "://" in name or Path(os.path.expanduser(name)).is_dir():
            return cls._of_folder(ledger, open_folder(name))
        kind = "batch" if name.startswith(_BATCH_PREFIX) else "job"
        try:
            job = ledger.job(_job_of_batch(ledger, name) if kind == "batch" else name)
        except (UnknownBatch, UnknownJob) as error:
            raise type(error)(
                f"{Path(name).absolute()} is no folder, and {ledger.database.name} has no {kind} {name!r}: name "
                "an output folder or what `headrace jobs` lists, or set HEADRACE_DATA_DIR or HEADRACE_DATABASE_URL as "
                "for that run"
            ) from error
        return cls._of_job(ledger, job)

    @classmethod
    def _of_folder(cls, ledger: Ledger, folder: OutputFolder) -> Self:
        report = read_report(folder)
        if report is None:
            raise NotVerifiable(f"folder {folder} holds no data set of headrace: name a job or its output folder")
        with suppress(UnknownJob):
            job = ledger.job(report["job_id"])
            # Of a copy the ledger knows no parts.
            is_copy = open_folder(job.output_dir) != folder
            return cls._of_copy(ledger, job, folder, report) if is_copy else cls._of_job(ledger, job)
        return cls._of_report(report, folder)

    @classmethod
    def _of_job(cls, ledger: Ledger, job: JobRecord) -> Self:
        # In this order: rows come, and none goes.
        num_rows = ledger.progress(job.id).rows_done
        names_now = partial(ledger.part_names, job.id)
        found = cls._with_parts(ledger, job, open_folder(job.output_dir), names_now())
        return replace(found, names_now=names_now, num_rows=num_rows)

    @classmethod
    def _of_copy(cls, ledger: Ledger, job: JobRecord, folder: OutputFolder, report: dict[str, Any]) -> Self:
        found = cls._with_parts(ledger, job, folder, folder.part_names())
        return replace(found, num_rows=_num_rows(report))

    @classmethod
    def _with_parts(cls, ledger: Ledger, job: JobRecord, folder: OutputFolder, parts: Iterable[str]) -> Self:
        spec = read_stored(JobSpec, job.spec)
        batch = ledger.batches.find(job.id) if spec.samples_each_row else None
        return cls(job.id, spec, folder, tuple(parts), job.weights, job.tenant, job.priority, batch)

    @classmethod
    def _of_report(cls, report: dict[str, Any], folder: OutputFolder) -> Self:
        job_id = report["job_id"]
        spec = read_stored(JobSpec, report["options"]) if "options" in report else None
        if spec is None or spec.samples_each_row:
            why = "had not completed" if spec is None else "is a batch's, whose input file says how its rows were asked"
            raise NotVerifiable(
                f"job {job_id} of folder {folder} is not in this ledger, and {why}: verify it with the "
                "HEADRACE_DATABASE_URL and HEADRACE_DATA_DIR that it was run with"
            )
        parts = tuple(folder.part_names())
        return cls(job_id, spec, folder, parts, report.get("weights"), num_rows=_num_rows(report))

    def rows(self) -> PartGroups:
        """The rows that are there by now. Raises `NotVerifiable` when there is none, `StorageError`."""
        rows = PartGroups(self.folder, sorted(self.part_names), self.names_now)
        if any(True for _ in rows.tables(["row"])):
            return rows
        if self.num_rows:
            rows_gone = f"all {self.num_rows:,} rows of job {self.job_id} are gone"
            raise RowsGone(f"{rows_gone}: no file of {self.folder} has one")
        raise NotVerifiable(f"folder {self.folder} holds no row of job {self.job_id} yet")


def _num_rows(report: dict[str, Any]) -> int | None:
    """What a manifest says of a job that has completed."""
    num_rows: int | None = report.get("rows", {}).get("done")
    return num_rows


def _job_of_batch(ledger: Ledger, batch_id: str) -> str:
    if (job_id := ledger.batches.find(batch_id).job_id) is None:
        raise NotVerifiable(f"batch {batch_id} has no rows: it has not begun, or has failed")
    return job_id
