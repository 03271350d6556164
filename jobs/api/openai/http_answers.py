"""What the routes of chats, responses and plain completions do alike once a request is with the workers."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import CLIENT_CLOSED_REQUEST, RETRY_SOON, ApiError
from ..event_stream import ClientGone, EventStreamResponse, ServerStops, while_wanted
from ..live_answers import LiveAnswers
from ..request_ids import HEADER
from ..state import answers_of
from .answer_bodies import Answer, Usage
from .answering import Chunks, chunk_stream, collect
from .asking import Asked
from .running_usage import RunningUsage

MakeBody = Callable[[Sequence[Answer], Usage], dict[str, Any]]


async def respond(request: Request, asked: Asked, make_body: MakeBody) -> Response:
    """All choices in one body. Raises `ApiError`.

    When nobody waits for it any more what is not complete is called off.
    """
    answers = answers_of(request)
    try:
        collected, usage = await while_wanted(collect(answers, asked), request.receive, request.app.state.stopping)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except ServerStops as error:
        raise server_stops(asked) from error
    finally:
        await close(answers, asked)
    return JSONResponse(make_body(collected, usage), headers=request_headers(asked))


def respond_in_chunks(
    request: Request, asked: Asked, chunks: Chunks, includes_usage: bool, running: RunningUsage | None
) -> Response:
    """All choices as server-sent events; what is not complete when the client leaves is called off."""
    answers = answers_of(request)
    return EventStreamResponse(
        chunk_stream(answers, asked, chunks, includes_usage, running),
        request.app.state.stopping,
        on_close=lambda: close(answers, asked),
        farewell=lambda: chunks.error(server_stops(asked)),
        headers=request_headers(asked),
    )


def request_headers(asked: Asked) -> dict[str, str]:
    return {HEADER: asked.id}


async def close(answers: LiveAnswers, asked: Asked) -> None:
    """Give back what a response held, and call off what of it is not complete.

    What is to go on all the same holds its tokens until it has ended.
    """
    answers.forget(asked.requests)
    if asked.open_choices and not asked.cancel_on_disconnect:
        answers.when_ended(asked.open_answers, asked.admissions.close)
        return
    asked.admissions.close()
    if asked.open_choices:
        answers.cancel(asked.open_requests)


def server_stops(asked: Asked) -> ApiError:
    """What the client is told when the server stops before its answer is complete."""
    then = "send the request again" if asked.cancel_on_disconnect else f"go on at /requests/{asked.id}/stream"
    error = ApiError(503, f"the server stops: {then}", "server_stops")
    error.headers = RETRY_SOON | request_headers(asked)
    return error
