"""The routes under `/jobs`. Plain functions: the server runs each in a thread, off its event loop."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, File, Form, Header, Query, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, ValidationError
from starlette.datastructures import UploadFile as SentFile
from starlette.requests import HTTPConnection

from ...storage.ledger.records import JobState
from .admission.admission import JobQuota
from .admission.caller import tenant_of
from .errors import ApiError, ErrorBody
from .job_requests import JobOptions, JobRequest, Priority
from .json_body import expect_json, media_type
from .schemas import DeletedJob, JobAnswer, JobList, WebhookList
from .service import JobService

Responses = dict[int | str, dict[str, Any]]
NOT_FOUND: Responses = {404: {"model": ErrorBody, "description": "There is no such job"}}
EVERYWHERE: Responses = {
    401: {"model": ErrorBody, "description": "There are API keys, and none that holds came with the request"},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or can not be used"},
    503: {"model": ErrorBody, "description": "The ledger, Redis, a job's sink or its output's store does not answer"},
}
LATER: Responses = {501: {"model": ErrorBody, "description": "It is of a later version than this server"}}
_BAD_CURSOR: Responses = {400: {"model": ErrorBody, "description": "There is no such job to list those after"}}
_BAD_BODY: Responses = {
    400: {"model": ErrorBody, "description": "The body is not JSON"},
    415: {"model": ErrorBody, "description": "The body is not said to be JSON"},
}
_ENDED: Responses = {409: {"model": ErrorBody, "description": "The job's state does not allow it"}}
_NO_ROOM: Responses = {507: {"model": ErrorBody, "description": "There is no room for the rows"}}
_NOT_OURS: Responses = {409: {"model": ErrorBody, "description": "The output folder holds something else"}}
_CREATE: Responses = {
    400: {"model": ErrorBody, "description": "The body can not be read"},
    404: {"model": ErrorBody, "description": "The model is not served here, or there is no such file"},
    409: {"model": ErrorBody, "description": "The Idempotency-Key belongs to another job"},
    408: {"model": ErrorBody, "description": "Nothing more of the body came for a minute"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body is of another type"},
    429: {"model": ErrorBody, "description": "More than the caller's limits, or than may wait here, allow"},
    **LATER,
    **_NO_ROOM,
}


def service_of(connection: HTTPConnection) -> JobService:
    """The caller's."""
    service: JobService = connection.app.state.service
    return service.of(tenant_of(connection))


def _expect_form(request: Request) -> None:
    if media_type(request) != "multipart/form-data":
        raise ApiError(415, "send the body with the header Content-Type: multipart/form-data", "unsupported_media_type")


def _expect_file(given: Any) -> Any:
    if not isinstance(given, SentFile):
        raise ValueError("a file is expected, with a filename")
    return given


Key = Annotated[
    str | None, Header(min_length=1, max_length=255, description="The job created with this key, if there is one.")
]
Service = Annotated[JobService, Depends(service_of)]
_OPTIONS = '{"model": "model", "prompt": "{text}"}'
UPLOAD_PATH = "/jobs/upload"
router = APIRouter(prefix="/jobs", tags=["jobs"], responses=EVERYWHERE)


@router.post("", status_code=201, responses=_CREATE, dependencies=[Depends(expect_json)])
def create_job(
    job: JobRequest, service: Service, quota: JobQuota, response: Response, idempotency_key: Key = None
) -> JobAnswer:
    """Queue a job over rows, an uploaded file or a URL. A worker for its model (and dtype) has to run for it to get on.

    What is at a URL is read before this is answered.
    """
    created = service.submit(job, idempotency_key, quota)
    response.headers["Location"] = f"/jobs/{created.id}"
    return created


@router.post(
    UPLOAD_PATH.removeprefix("/jobs"), status_code=201, responses=_CREATE, dependencies=[Depends(_expect_form)]
)
def upload_job(
    file: Annotated[
        UploadFile,
        BeforeValidator(_expect_file),
        File(description="JSONL, CSV (both also .gz, .zst) or Parquet, by its name's ending."),
    ],
    job: Annotated[str, Form(description="The options of a job, without rows, as JSON.", examples=[_OPTIONS])],
    service: Service,
    quota: JobQuota,
    response: Response,
    idempotency_key: Key = None,
) -> JobAnswer:
    """Queue a job over the rows of a file that comes with the request."""
    name = file.filename or "file"
    created = service.submit_file(_options(job), name, file.file, idempotency_key, quota)
    response.headers["Location"] = f"/jobs/{created.id}"
    return created


def _options(text: str) -> JobOptions:
    try:
        return JobOptions.model_validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False)
        if found[0]["type"] == "json_invalid":
            raise ApiError(400, "job: it is not valid JSON", "invalid_json", "job") from error
        placed = [{**each, "loc": ("body", *(each["loc"] or ("job",)))} for each in found]
        raise RequestValidationError(placed) from error


@router.get("", responses=_BAD_CURSOR)
def list_jobs(
    service: Service,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64, description="`last_id` of the page before")] = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state")] = None,
) -> JobList:
    """List your jobs, the newest first."""
    return service.jobs(limit, after, state)


@router.get("/{job_id}", responses=NOT_FOUND)
def get_job(job_id: str, service: Service) -> JobAnswer:
    """One job: its state and counts, how fast it goes and how long it will take."""
    return service.job(job_id)


@router.delete("/{job_id}", responses=NOT_FOUND | _NOT_OURS)
def delete_job(
    job_id: str,
    service: Service,
    output: Annotated[bool, Query(description="Also remove its results; else they stay on the server.")] = False,
) -> DeletedJob:
    """Forget a job; one that has not ended is cancelled first. Its webhook is told nothing more."""
    service.delete(job_id, output)
    return DeletedJob(id=job_id)


@router.get("/{job_id}/webhooks", responses=NOT_FOUND)
def get_webhooks(job_id: str, service: Service) -> WebhookList:
    """Whether the job's webhook has been told of its end, and what went wrong last."""
    return service.webhooks(job_id)


@router.post("/{job_id}/cancel", responses=NOT_FOUND)
def cancel_job(job_id: str, service: Service) -> JobAnswer:
    """Stop a job. What is finished stays readable; a job that has ended stays as it is."""
    return service.cancel(job_id)


@router.post("/{job_id}/pause", responses=NOT_FOUND | _ENDED)
def pause_job(job_id: str, service: Service) -> JobAnswer:
    """Begin no more rows of a job until it is resumed. What is finished stays readable."""
    return service.pause(job_id)


@router.post("/{job_id}/resume", responses=NOT_FOUND | _ENDED)
def resume_job(job_id: str, service: Service) -> JobAnswer:
    """Let a paused job go on; a running one stays as it is."""
    return service.resume(job_id)


@router.post("/{job_id}/retry", responses=NOT_FOUND | _ENDED | _NO_ROOM)
def retry_job(job_id: str, service: Service) -> JobAnswer:
    """Try a completed job's failed rows again. Their answers take the places of their errors."""
    return service.retry(job_id)


@router.post("/{job_id}/priority", responses=_BAD_BODY | NOT_FOUND | _ENDED, dependencies=[Depends(expect_json)])
def set_priority(job_id: str, service: Service, priority: Annotated[Priority, Body(embed=True)]) -> JobAnswer:
    """Have the job's shards taken before those of jobs with a lower priority. What is under way goes on."""
    return service.set_priority(job_id, priority)
