"""What a job that comes over HTTP asks for."""

from headrace.jobs.api.job_requests import JobRequest
from headrace.jobs.api.models import ServedModels
from headrace.jobs.spec.schemas import JobSpec

from ..running import MODEL


def test_what_is_not_said_depends_on_the_rest():
    served = ServedModels.of([str(MODEL)]).all[0]
    wanted = {}
    for sampling in ({}, {"reasoning": True}, {"reasoning": True, "thinking_token_budget": 50}, {"max_tokens": 7}):
        asked = JobRequest.model_validate({"model": served.name, "rows": [{"text": "x"}], "sampling": sampling})
        wanted[str(sampling)] = JobSpec.parse(**asked.of_spec(served)).sampling.max_tokens
    assert list(wanted.values()) == [256, 32_768, 306, 7]
