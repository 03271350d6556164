"""How a batch's job is known from others."""

from .ledger import Ledger
from .records import JobRecord

# No client's idempotency key may begin so: a batch would take the client's job for its own.
JOB_KEY_START = "batch/"


def batch_job_key(batch_id: str) -> str:
    """The idempotency key of a batch's job."""
    return f"{JOB_KEY_START}{batch_id}"


def is_unwritten(ledger: Ledger, job: JobRecord) -> bool:
    """Whether a batch that has not ended is yet to be written from the job, which has."""
    if job.idempotency_key is None or not job.idempotency_key.startswith(JOB_KEY_START):
        return False
    return job.idempotency_key.removeprefix(JOB_KEY_START) in ledger.batches.open_ids()
