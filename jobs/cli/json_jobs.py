"""Jobs as JSON, for scripts: as the API answers them, and what only the command line tells."""

from typing import Any

from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord


def json_job(ledger: Ledger, job: JobRecord) -> dict[str, Any]:
    """A job as `GET /jobs/{id}` has it, but for `workers`, with its `tenant`, `output`, `weights` and `spec`."""
    # Not every command has to wait for pydantic's models.
    from ..api.schemas import JobAnswer
    from ..spec.lora import asked_model

    standing = ledger.overview.standing(job.id)
    job = standing.job
    answer = JobAnswer.of(standing, asked_model(job), None)
    more = {"tenant": job.tenant, "output": job.output_dir, "weights": job.all_weights, "spec": job.spec}
    return answer.model_dump(mode="json", exclude={"workers"}) | more
