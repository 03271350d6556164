"""Making some of a job's rows again, on the way that all rows take, and comparing them with those there are."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...storage.ledger.records import JobState
from ...storage.output.local_folder import LocalFolder
from ...storage.output.manifest import OutputMode, read_report
from ...storage.readers import InputSource
from ...storage.rows.columns import REASONING_NAMES, input_names, plain_rows
from ..client.client import Client, Job
from ..errors import NotVerifiable
from ..planning.producer import Terms
from ..spec.prompt_template import asked_columns
from ..spec.schemas import JobSpec
from .circumstances import Change, changes
from .differences import Difference, first_difference
from .receipts import Receipt
from .sample import Sample
from .stored_rows import StoredRows

_TIDY_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Verification:
    """What came of it. `weights`: those the rows were made again with; `differences`: one a row that is not equal.

    `changes`: in what the rows' own receipts differ from those of the rows made again.
    """

    receipt: Receipt
    sample: Sample
    weights: str | None
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...] = ()

    @property
    def same_weights(self) -> bool | None:
        """Whether they are those of the job; None where either is not known."""
        if None in (self.receipt.weights, self.weights):
            return None
        return self.receipt.weights == self.weights

    @property
    def num_missing(self) -> int:
        """How many rows were done and are not there any more, as their files were removed."""
        return max(0, (self.receipt.num_rows or 0) - self.sample.num_rows)


def verify(
    client: Client,
    receipt: Receipt,
    sample: Sample,
    model: str | None = None,
    tolerance: float = 0.01,
    worker_options: Sequence[str] = (),
) -> Verification:
    """Make a sample's rows again and compare. Starts a worker for that time if the model's queue has none.

    `model`: where it is by now, if elsewhere. Raises `NotVerifiable`, `ModelError`, `WorkerFailedError`.
    """
    changed = {"cache": False, "limit": None, **({"model": model} if model is not None else {})}
    spec = JobSpec.model_validate(receipt.spec.model_dump() | changed)
    with _answered_again(client, receipt, sample, spec, worker_options) as job:
        again = {row["row"]: row for row in plain_rows(job.results())}
        weights = client.job(job.id).record.weights
    # What a data set of before has of the input may have a name that is ours by now.
    inputs = list(input_names(_without_reasoning(sample, spec).column_names, spec.schema_version))
    pairs = [(row, again[row["row"]]) for row in plain_rows(sample.table.drop_columns(inputs))]
    found = (first_difference(*pair, tolerance) for pair in pairs)
    differences = tuple(each for each in found if each is not None)
    return Verification(receipt, sample, weights, differences, changes(pairs))


@contextmanager
def _answered_again(
    client: Client, receipt: Receipt, sample: Sample, spec: JobSpec, worker_options: Sequence[str]
) -> Iterator[Job]:
    """A job of these rows that has completed; it is forgotten afterwards, with its data set."""
    folder = client.settings.data_dir / "verify" / uuid.uuid4().hex
    source = _source(client, receipt, sample, spec)
    # Before the rest of the job, which may still be running.
    terms = Terms(tenant=receipt.tenant, priority=receipt.priority + 1)
    job = client.submit_spec(source, spec, folder, OutputMode.NEW, terms=terms)
    try:
        with job.local_workers(worker_options) as workers:
            for progress in job.watch():
                if progress.state is JobState.RUNNING:
                    workers.tick(progress.rows_done)
            if progress.state is not JobState.COMPLETED:
                raise NotVerifiable(f"job {job.id}, which makes the rows again, was {progress.state}")
            _wait_until_tidy(folder)
        yield job
    finally:
        job.delete(with_output=True)
        with suppress(OSError):
            folder.parent.rmdir()


def _source(client: Client, receipt: Receipt, sample: Sample, spec: JobSpec) -> InputSource:
    """What the sample's rows were made of. Raises `NotVerifiable`."""
    if receipt.batch is None:
        table = _without_reasoning(sample, spec)
        name, is_image = f"{receipt.job_id}, sample", spec.image == "custom_id"
        return StoredRows(name, table, spec.schema_version, is_image, asked_columns(spec))
    # Here, not above: what reads the API's requests takes half a second to load.
    from .batch_lines import asked_lines

    return asked_lines(client, receipt.batch, spec, sample.table["row"].to_pylist())


def _without_reasoning(sample: Sample, spec: JobSpec) -> pa.Table:
    """The sample's rows without what a job with reasoning, or a batch, adds to every job's columns."""
    has_reasoning = spec.sampling.reasoning or spec.samples_each_row
    added = [name for name in sample.table.column_names if has_reasoning and name in REASONING_NAMES]
    return sample.table.drop_columns(added)


def _wait_until_tidy(folder: Path) -> None:
    """Until the worker has written down how the job went: deleted before, it would be missed by the worker."""
    deadline = time.monotonic() + _TIDY_SECONDS
    while time.monotonic() < deadline and "state" not in (read_report(LocalFolder(folder)) or {}):
        time.sleep(_POLL_SECONDS)
