"""`/requests/{request_id}/stream`: the tokens of an interactive request, also for a reader that was cut off."""

from collections.abc import AsyncGenerator
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response, WebSocket
from starlette.requests import HTTPConnection

from ..live.requests import LiveState
from ..streams.events import StreamEvent
from .admission.caller import tenant_of
from .errors import ApiError
from .event_stream import STREAM_RESPONSES, EventStreamResponse, cursor_of, send_events, sse_events
from .state import answers_of

router = APIRouter(tags=["requests"])
Choice = Annotated[str, Query(description="Which of its answers, from 0 on, where it asked for several (`n`)")]
After = Annotated[str | None, Query(description="The number of the last token that is known already")]
LastEventId = Annotated[str | None, Header(description="As `after`; what browsers send when they reconnect")]


@router.get("/requests/{request_id}/stream", responses=STREAM_RESPONSES, response_class=Response)
async def stream_request(
    request_id: str,
    request: Request,
    after: After = None,
    choice: Choice = "0",
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a request's tokens, also from a place in the middle. Its id is the `x-request-id` of its answer.

    Reading changes nothing: any number may read, and leave, as they like.
    """
    cursor = cursor_of(last_event_id, after)
    events = await request_events(request, request_id, choice, cursor)
    return EventStreamResponse(sse_events(events), request.app.state.stopping)


@router.websocket("/requests/{request_id}/stream")
async def stream_request_over_websocket(
    websocket: WebSocket,
    request_id: str,
    after: After = None,
    choice: Choice = "0",
    last_event_id: LastEventId = None,
) -> None:
    """The same events as JSON texts."""
    cursor = cursor_of(last_event_id, after)
    await send_events(
        websocket, await request_events(websocket, request_id, choice, cursor), websocket.app.state.stopping
    )


async def request_events(
    connection: HTTPConnection, request_id: str, choice: str, after: int
) -> AsyncGenerator[StreamEvent, None]:
    """The events of a choice of a request of the caller's after the token `after`. Raises `ApiError` (404)."""
    answers = answers_of(connection)
    record = await run_sync(answers.get, request_id, tenant_of(connection))
    samples = map(str, range(record.request.sampling.n))
    if choice not in samples:
        raise ApiError(404, f"request {request_id!r} has no such choice", "choice_not_found", "choice")
    return answers.events(record.request, int(choice), after, has_ended=record.state is LiveState.ENDED)
