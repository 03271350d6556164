"""The routes under `/jobs`. Plain functions: the server runs each in a thread, off its event loop."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from .errors import ApiError, ErrorBody
from .schemas import JobAnswer, JobList, JobRequest, ResultPage
from .service import JobService

_MAX_INT64 = 2**63 - 1
_Responses = dict[int | str, dict[str, Any]]
_NOT_FOUND: _Responses = {404: {"model": ErrorBody, "description": "There is no such job"}}
_ENDED: _Responses = {409: {"model": ErrorBody, "description": "The job's state does not allow it"}}
_EVERYWHERE: _Responses = {
    422: {"model": ErrorBody, "description": "A field is missing, unknown or can not be used"},
    503: {"model": ErrorBody, "description": "The ledger or Redis does not answer"},
}
_CREATE: _Responses = {
    400: {"model": ErrorBody, "description": "The body is not JSON"},
    404: {"model": ErrorBody, "description": "The model is not served here"},
    409: {"model": ErrorBody, "description": "The Idempotency-Key belongs to another job"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body is not said to be JSON"},
}


def _service(request: Request) -> JobService:
    service: JobService = request.app.state.service
    return service


def _expect_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the job as JSON, with the header Content-Type: application/json", "not_json")


Key = Annotated[
    str | None, Header(min_length=1, max_length=255, description="The job created with this key, if there is one.")
]
Service = Annotated[JobService, Depends(_service)]
router = APIRouter(prefix="/jobs", tags=["jobs"], responses=_EVERYWHERE)


@router.post("", status_code=201, responses=_CREATE, dependencies=[Depends(_expect_json)])
def create_job(job: JobRequest, service: Service, response: Response, idempotency_key: Key = None) -> JobAnswer:
    """Queue a job over the rows given. A worker for its model (and dtype) has to run for it to get on."""
    created = service.submit(job, idempotency_key)
    response.headers["Location"] = f"/jobs/{created.id}"
    return created


@router.get("")
def list_jobs(service: Service, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> JobList:
    """List jobs, the newest first."""
    return JobList(data=service.jobs(limit))


@router.get("/{job_id}", responses=_NOT_FOUND)
def get_job(job_id: str, service: Service) -> JobAnswer:
    """One job: its state and counts."""
    return service.job(job_id)


@router.get("/{job_id}/results", responses=_NOT_FOUND, response_model=ResultPage)
def get_results(
    job_id: str,
    service: Service,
    after_row: Annotated[int | None, Query(ge=0, le=_MAX_INT64, description="`last_row` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Finished rows in the order of the input, also while the job runs."""
    page = service.results(job_id, after_row, limit)
    # Serialized here, in our thread, not by the framework on the event loop.
    return Response(page.model_dump_json(), media_type="application/json")


@router.post("/{job_id}/cancel", responses=_NOT_FOUND)
def cancel_job(job_id: str, service: Service) -> JobAnswer:
    """Stop a job. What is finished stays readable; a job that has ended stays as it is."""
    return service.cancel(job_id)


@router.post("/{job_id}/pause", responses=_NOT_FOUND | _ENDED)
def pause_job(job_id: str, service: Service) -> JobAnswer:
    """Begin no more rows of a job until it is resumed. What is finished stays readable."""
    return service.pause(job_id)


@router.post("/{job_id}/resume", responses=_NOT_FOUND | _ENDED)
def resume_job(job_id: str, service: Service) -> JobAnswer:
    """Let a paused job go on; a running one stays as it is."""
    return service.resume(job_id)


@router.post("/{job_id}/retry", responses=_NOT_FOUND | _ENDED)
def retry_job(job_id: str, service: Service) -> JobAnswer:
    """Try a completed job's failed rows again. Their answers take the places of their errors."""
    return service.retry(job_id)
