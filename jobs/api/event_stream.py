"""Server-sent events and WebSockets over token streams: what is sent, and what becomes of it when either side leaves.

The events of a raw stream are JSON objects, the same over both:

    {"type": "tokens", "first": 3, "token_ids": [17, 4], "texts": ["He", "llo"], "text": "Hello"}
    {"type": "end", "num_tokens": 4, "finish_reason": "stop", "text": "", "usage": {"prompt_tokens": 9, …}}

`first` is the number of the first token, counted from 1; `text` is all that the event adds, so that the texts of all
events make up the answer. Where they were asked for, `logprobs` has an item a token, and beside the first token
`prompt_logprobs` has an item a token of the prompt. Where one of the request's stops ended the answer, the end has it
as `stop_reason`, a text or a token id. An answer that failed ends with the finish reason "error" and an
`error` of a `code` and a `message`. As server-sent events, `id` is the number of the last token: a reader that comes
back with it as `Last-Event-ID` gets what follows. The end is an event of its own type, `end`; what begins with a colon
only keeps the connection open.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..streams.events import StreamEvent
from .errors import ApiError, ErrorBody

T = TypeVar("T")
# Made once: `dumps` with options makes one a call.
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
HEARTBEAT_SECONDS = 15.0
_HEARTBEAT = b": still here\n\n"
# The module's description without its first line.
_DESCRIPTION = (__doc__ or "").partition("\n\n")[2]
_RETRY = b"retry: 1000\n\n"
_CURSOR = re.compile(r"[0-9]{1,18}", re.ASCII)
_SERVICE_RESTART = 1012
# For the routes' OpenAPI description.
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": _DESCRIPTION, "content": {"text/event-stream": {}}},
    400: {"model": ErrorBody, "description": "The cursor is not the number of a token"},
    404: {"model": ErrorBody, "description": "There is no such stream"},
    501: {"model": ErrorBody, "description": "It is of a later version than this server"},
}


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class ServerStops(Exception):
    """The server has been told to stop, and an answer is not complete by the time it has to be."""


async def while_wanted(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """The result of `work`, which is cancelled when nobody waits for it.

    Raises `ClientGone` when the client has left, `ServerStops` when the server is about to.
    """
    task = asyncio.ensure_future(work)
    gone, stopped = asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(stopping.wait())
    tasks = (task, gone, stopped)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if gone.done() else ServerStops
    finally:
        for each in tasks:
            each.cancel()
        # Not before `work` has put away what it holds.
        await asyncio.wait(tasks)


async def never() -> Message:
    """In gRPC a client that has gone is noticed for us: the call's task is cancelled."""
    message: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await message


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass


class EventStreamResponse(Response):
    """Sends what `body` yields, and a comment whenever it has been silent for a while.

    `on_close` is awaited at the end whatever has happened, told whether the body was sent whole. What `farewell` makes
    is sent where the server stops before.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        stopping: asyncio.Event,
        *,
        on_close: Callable[[], Awaitable[None]] | None = None,
        farewell: Callable[[], bytes] = bytes,
        headers: Mapping[str, str] | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        # No proxy is to hold back events, or to keep them.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._body = body
        self._stopping = stopping
        self._on_close = on_close
        self._farewell = farewell
        self._heartbeat_seconds = heartbeat_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send)
        try:
            await sender.start(self.status_code, self.raw_headers)
            await while_wanted(self._send_all(sender), receive, self._stopping)
        except ClientGone:
            return
        except ServerStops:
            await sender.send(self._farewell())
            await sender.end()
        else:
            await sender.end()
        finally:
            if self._on_close is not None:
                await self._on_close()

    async def _send_all(self, sender: "_Sender") -> None:
        heartbeats = asyncio.ensure_future(sender.keep_alive(self._heartbeat_seconds))
        try:
            async with aclosing(self._body) as body:
                async for data in body:
                    await sender.send(data)
        finally:
            heartbeats.cancel()
            await asyncio.wait((heartbeats,))


class _Sender:
    """A response's way out; knows when something went it last."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_sent = 0

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        self._num_sent += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, seconds: float) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(seconds)
            if self._num_sent == before:
                await self.send(_HEARTBEAT)


def cursor_of(last_event_id: str | None, after: str | None) -> int:
    """The number of the last token that a reader has: its `Last-Event-ID`, or `after` of the query.

    Raises `ApiError` (400).
    """
    # A browser that reconnects repeats the query of its first time.
    name, given = ("Last-Event-ID", last_event_id) if last_event_id else ("after", after)
    if given is None:
        return 0
    if not _CURSOR.fullmatch(given):
        raise ApiError(400, f"{name} has to be the number of a token, from 0 on", "invalid_cursor", name)
    return int(given)


def event_object(event: StreamEvent) -> dict[str, Any]:
    """A raw event as this module's description has it."""
    if event.is_final:
        return _end_object(event)
    tokens: dict[str, Any] = {
        "type": "tokens",
        "first": event.first,
        "token_ids": event.token_ids,
        "texts": event.texts,
        "text": event.text,
    }
    if event.logprobs is not None:
        tokens["logprobs"] = event.logprobs
    if event.prompt_logprobs is not None:
        tokens["prompt_logprobs"] = event.prompt_logprobs
    return tokens


def _end_object(event: StreamEvent) -> dict[str, Any]:
    end: dict[str, Any] = {
        "type": "end",
        "num_tokens": event.last,
        "finish_reason": event.finish_reason,
        "text": event.text,
        "usage": None if event.usage is None else asdict(event.usage),
    }
    if event.stop_reason is not None:
        end["stop_reason"] = event.stop_reason
    if event.error is not None:
        end["error"] = asdict(event.error)
    return end


def event_json(event: StreamEvent) -> str:
    return _to_json(event_object(event))


async def sse_events(events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
    """A raw stream as server-sent events."""
    yield _RETRY
    async with aclosing(events) as open_events:
        async for event in open_events:
            kind = "event: end\n" if event.is_final else ""
            yield f"id: {event.last}\n{kind}data: {event_json(event)}\n\n".encode()


async def send_events(websocket: WebSocket, events: AsyncGenerator[StreamEvent, None], stopping: asyncio.Event) -> None:
    """Accept a WebSocket, send it a raw stream, one JSON text an event, and close it."""
    await websocket.accept()
    with suppress(ClientGone, WebSocketDisconnect):
        try:
            await while_wanted(_send_texts(websocket, events), websocket.receive, stopping)
        except ServerStops:
            await websocket.close(_SERVICE_RESTART)
        else:
            await websocket.close()


async def _send_texts(websocket: WebSocket, events: AsyncGenerator[StreamEvent, None]) -> None:
    async with aclosing(events) as open_events:
        async for event in open_events:
            await websocket.send_text(event_json(event))
