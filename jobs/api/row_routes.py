"""`/jobs/{job_id}/rows/{row}/stream`: watch a row of a job being answered."""

from collections.abc import AsyncGenerator
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Path, Request, Response, WebSocket
from starlette.requests import HTTPConnection

from ..results.row_events import RowEvents, StoredRow
from ..streams.events import StreamEvent
from ..streams.hub import StreamHub
from .errors import ApiError
from .event_stream import STREAM_RESPONSES, EventStreamResponse, cursor_of, send_events, sse_events
from .job_routes import EVERYWHERE, service_of
from .request_routes import After, LastEventId

_MAX_INT32 = 2**31 - 1
router = APIRouter(prefix="/jobs", tags=["results"], responses=EVERYWHERE)
Row = Annotated[int, Path(ge=0, le=_MAX_INT32, description="The row's number in the input, from 0 on")]


@router.get("/{job_id}/rows/{row}/stream", responses=STREAM_RESPONSES, response_class=Response)
async def stream_row(
    job_id: str, row: Row, request: Request, after: After = None, last_event_id: LastEventId = None
) -> Response:
    """Follow a row's tokens: those so far and those to come. A row that has not begun is waited for.

    One that is stored by now comes as a single event, the end, with all its text. The texts of all events together
    are the row's `output`.
    """
    events = await row_events(request, job_id, row, cursor_of(last_event_id, after))
    return EventStreamResponse(sse_events(events), request.app.state.stopping)


@router.websocket("/{job_id}/rows/{row}/stream")
async def stream_row_over_websocket(
    websocket: WebSocket, job_id: str, row: Row, after: After = None, last_event_id: LastEventId = None
) -> None:
    """The same events as JSON texts."""
    events = await row_events(websocket, job_id, row, cursor_of(last_event_id, after))
    await send_events(websocket, events, websocket.app.state.stopping)


async def row_events(
    connection: HTTPConnection, job_id: str, row: int, after: int
) -> AsyncGenerator[StreamEvent, None]:
    """The events of a row of the caller's after the token `after`. Raises `ApiError` (404)."""
    state, service = connection.app.state, service_of(connection)
    job = await run_sync(service.record, job_id)
    if row >= job.num_rows:
        raise ApiError(404, f"job {job_id!r} has no row {row}", "row_not_found", "row")
    hub: StreamHub = state.live.hub
    events = RowEvents(state.row_watch, StoredRow(state.watched_outputs, job.id, row), after)
    return events.aevents(lambda stream_id, last, seconds: hub.events(stream_id, last, timeout=seconds))
