"""How a batch's job is known from others."""

from ..storage.records import JobRecord

# No client's idempotency key may begin so: a batch would take the client's job for its own.
JOB_KEY_START = "batch/"


def batch_job_key(batch_id: str) -> str:
    """The idempotency key of a batch's job."""
    return f"{JOB_KEY_START}{batch_id}"


def is_batch_job(job: JobRecord) -> bool:
    """Whether a batch was, or is to be, written from the job."""
    return job.idempotency_key is not None and job.idempotency_key.startswith(JOB_KEY_START)
