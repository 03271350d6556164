"""A job's results: in pages, or all of them as one file, also while the job runs."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from ..results.exports import Writer, arrow, export, json_lines, parquet
from .errors import ErrorBody
from .job_routes import EVERYWHERE, LATER, NOT_FOUND, Responses, Service
from .schemas import ResultPage
from .service import JobService

_MAX_INT64 = 2**63 - 1
_PARQUET = "application/vnd.apache.parquet"
_ARROW = "application/vnd.apache.arrow.stream"
_JSON_LINES = "application/x-ndjson"
_WRITERS: dict[str, tuple[str, Writer]] = {
    _PARQUET: ("parquet", parquet),
    _ARROW: ("arrow", arrow),
    _JSON_LINES: ("jsonl", json_lines),
}
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_GONE: Responses = {409: {"model": ErrorBody, "description": "A part of them is gone or damaged"}}
router = APIRouter(prefix="/jobs", tags=["results"], responses=EVERYWHERE | NOT_FOUND | LATER | _GONE)


def _is(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "The file", "content": {media_type: _BINARY}}}


@router.get(
    "/{job_id}/results",
    response_model=ResultPage,
    responses={200: {"content": dict.fromkeys(_WRITERS, _BINARY)}},
)
def get_results(
    job_id: str,
    service: Service,
    after_row: Annotated[int | None, Query(ge=0, le=_MAX_INT64, description="`last_row` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    accept: Annotated[str | None, Header(description="The type of a file, for all rows instead of a page")] = None,
) -> Response:
    """Finished rows in the order of the input, also while the job runs."""
    if (wanted := _wanted(accept)) is not None:
        return _file(service, job_id, wanted)
    page = service.results(job_id, after_row, limit)
    # Serialized here, in our thread, not by the framework on the event loop.
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{job_id}/results.parquet", response_class=Response, responses=_is(_PARQUET))
def get_parquet(job_id: str, service: Service) -> Response:
    """All rows finished by now as one Parquet file, about in the order in which they were finished."""
    return _file(service, job_id, _PARQUET)


@router.get("/{job_id}/results.arrow", response_class=Response, responses=_is(_ARROW))
def get_arrow(job_id: str, service: Service) -> Response:
    """All rows finished by now as an Arrow IPC stream, about in the order in which they were finished."""
    return _file(service, job_id, _ARROW)


@router.get("/{job_id}/results.jsonl", response_class=Response, responses=_is(_JSON_LINES))
def get_json_lines(job_id: str, service: Service) -> Response:
    """All rows finished by now, a JSON object a line, about in the order in which they were finished."""
    return _file(service, job_id, _JSON_LINES)


def _wanted(accept: str | None) -> str | None:
    """The file that the client asks for; the first it names counts."""
    asked = (part.partition(";")[0].strip().lower() for part in (accept or "").split(","))
    return next((media_type for media_type in asked if media_type in _WRITERS), None)


def _file(service: JobService, job_id: str, media_type: str) -> Response:
    ending, write = _WRITERS[media_type]
    job = service.record(job_id)
    pieces = export(service.client.ledger, job, write)
    # What goes wrong before the first piece can still be said.
    first = next(pieces, b"")
    headers = {"Content-Disposition": f'attachment; filename="{job.id}.{ending}"'}
    return StreamingResponse(_chained(first, pieces), media_type=media_type, headers=headers)


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    return (piece for piece in itertools.chain([first], rest) if piece)
