"""The calls of `headrace.proto`: what the HTTP routes do, said in gRPC."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from grpc.aio import ServicerContext as Context
from starlette.requests import HTTPConnection, Request
from starlette.types import Message

from ..api.admission.authentication import RESPONSE_HEADERS, KeyRing, Refused
from ..api.errors import ApiError
from ..api.event_stream import never, while_wanted
from ..api.live_answers import LiveAnswers
from ..api.openai.answering import choice_events, expect_proper
from ..api.openai.asking import Asked
from ..api.openai.chat_schemas import ChatCompletionRequest
from ..api.openai.http_answers import close, request_headers
from ..api.openai.route import asker_of, in_turn, refusals
from ..api.request_routes import request_events
from ..api.row_routes import row_events
from ..streams.events import StreamEvent
from .bodies import body_of
from .headrace_pb2 import GenerateRequest, StreamRequest
from .headrace_pb2_grpc import HeadraceServicer
from .responses import response_of
from .statuses import status_of

# A call's own part: it writes what there is to say, and raises what the HTTP routes raise.
Work = Callable[[HTTPConnection, Context], Coroutine[Any, Any, None]]


class HeadraceService(HeadraceServicer):
    """Answers calls with what `app` answers HTTP requests with: its keys, its limits, its models."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    @property
    def _live(self) -> LiveAnswers:
        live: LiveAnswers = self._app.state.live
        return live

    async def Generate(self, request: GenerateRequest, context: Context) -> None:
        """A call that is cancelled has its answer called off."""

        async def generate(connection: HTTPConnection, context: Context) -> None:
            async with self._handed_over(connection, request) as asked:
                [live] = asked.requests
                await context.send_initial_metadata(_metadata(connection, asked))
                async with aclosing(choice_events(self._live, asked)) as events:
                    async for choice, event in events:
                        await context.write(response_of(live.stream_ids[choice], choice, event))

        await self._answer(generate, context)

    async def Stream(self, request: StreamRequest, context: Context) -> None:
        """The tokens of an answer, or of a job's row, after the one that the request names."""

        async def stream(connection: HTTPConnection, context: Context) -> None:
            choice, events = await self._events(connection, request)
            async with aclosing(events) as open_events:
                async for event in open_events:
                    if event.is_final:
                        expect_proper(event)
                    await context.write(response_of(request.id, choice, event))

        await self._answer(stream, context)

    async def _answer(self, work: Work, context: Context) -> None:
        try:
            connection = await self._connection(context)
            with refusals():
                await while_wanted(work(connection, context), never, self._app.state.stopping)
            return
        # The boundary: whatever went wrong is the call's status.
        except Exception as error:  # noqa: BLE001
            status = status_of(error)
        await context.abort(status.code, status.message, status.trailing_metadata)

    async def _connection(self, context: Context) -> HTTPConnection:
        """The call as the HTTP API knows its requests. Raises `ApiError` (401), `LedgerError`."""
        keys: KeyRing = self._app.state.keys
        given = [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
        caller = await keys.caller(given)
        if isinstance(caller, Refused):
            raise ApiError(401, caller.value, "invalid_api_key")
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        state = {"tenant": caller, RESPONSE_HEADERS: {}, "left": left}
        return Request({"type": "http", "app": self._app, "headers": [], "state": state}, receive)

    @asynccontextmanager
    async def _handed_over(self, connection: HTTPConnection, request: GenerateRequest) -> AsyncIterator[Asked]:
        """With the workers; called off at the end, also where the client leaves while it is handed over."""
        body, asker = body_of(request), asker_of(connection)
        if isinstance(body, ChatCompletionRequest):
            asking = asyncio.ensure_future(in_turn(connection, asker.chat, body))
        else:
            asking = asyncio.ensure_future(in_turn(connection, asker.completions, body))
        try:
            yield await asyncio.shield(asking)
        finally:
            # A worker that has gone silent is not waited for any more.
            connection.state.left.set()
            await asyncio.wait((asking,))
            if asking.exception() is None:
                await close(self._live, asking.result())

    async def _events(
        self, connection: HTTPConnection, request: StreamRequest
    ) -> tuple[int, AsyncGenerator[StreamEvent, None]]:
        """Which choice's events, and these. Raises `ApiError` (404)."""
        stream, _, part = request.id.partition("/")
        if stream.startswith("req_"):
            choice = part or "0"
            events = await request_events(connection, stream, choice, request.after)
            return int(choice), events
        if not (part.isascii() and part.isdecimal()):
            raise ApiError(404, f"there is no stream {request.id!r}", "stream_not_found", "id")
        return 0, await row_events(connection, stream, int(part), request.after)


def _metadata(connection: HTTPConnection, asked: Asked) -> tuple[tuple[str, str], ...]:
    headers = request_headers(asked) | connection.scope["state"][RESPONSE_HEADERS]
    return tuple((name.lower(), value) for name, value in headers.items())
