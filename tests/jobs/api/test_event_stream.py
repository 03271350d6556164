"""How a response is sent while its client may leave and the server may stop, without a server."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.jobs.api.event_stream import ClientGone, EventStreamResponse, ServerStops, cursor_of, while_wanted

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


class Connection:
    """A client that reads everything, until it leaves."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.arrived = asyncio.Condition()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self.arrived:
            self.messages.append(message)
            self.arrived.notify_all()

    async def wait_for(self, body: bytes) -> None:
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: body in self.body)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return self.messages[-1].get("more_body") is False


class Source:
    """A body whose end a test decides on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.closed = False

    async def body(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first "
            await self.go_on.wait()
            yield b"last"
        finally:
            self.closed = True


def respond(
    source: Source, connection: Connection, stopping: asyncio.Event, closed: list[str], **options: Any
) -> "asyncio.Task[None]":
    async def on_close() -> None:
        closed.append("closed" if source.closed else "open")

    response = EventStreamResponse(source.body(), stopping, on_close=on_close, **options)
    return asyncio.ensure_future(response(SCOPE, connection.receive, connection.send))


def test_a_body_is_sent_whole() -> None:
    async def run() -> None:
        source, connection, closed = Source(), Connection(), list[str]()
        task = respond(source, connection, asyncio.Event(), closed, farewell=lambda: b"stopped")
        await connection.wait_for(b"first ")
        source.go_on.set()
        await task
        assert (connection.body, connection.is_complete, closed) == (b"first last", True, ["closed"])

    asyncio.run(run())


def test_when_the_client_leaves_the_body_is_closed() -> None:
    async def run() -> None:
        source, connection, closed = Source(), Connection(), list[str]()
        task = respond(source, connection, asyncio.Event(), closed, farewell=lambda: b"stopped")
        await connection.wait_for(b"first ")
        connection.gone.set()
        await task
        assert (connection.body, connection.is_complete, closed) == (b"first ", False, ["closed"])

    asyncio.run(run())


def test_when_the_server_stops_the_client_is_told() -> None:
    async def run() -> None:
        source, connection, stopping, closed = Source(), Connection(), asyncio.Event(), list[str]()
        task = respond(source, connection, stopping, closed, farewell=lambda: b"stopped")
        await connection.wait_for(b"first ")
        stopping.set()
        await task
        assert (connection.body, connection.is_complete, closed) == (b"first stopped", True, ["closed"])

    asyncio.run(run())


def test_a_silent_stream_shows_that_it_is_there() -> None:
    async def run() -> None:
        source, connection = Source(), Connection()
        task = respond(source, connection, asyncio.Event(), [], heartbeat_seconds=0.01)
        await connection.wait_for(b"first : still here\n\n: still here\n\n")
        source.go_on.set()
        await task
        assert connection.body.endswith(b": still here\n\nlast")

    asyncio.run(run())


def test_what_a_body_raises_is_raised_and_it_is_closed() -> None:
    async def run() -> None:
        closed: list[str] = []

        async def body() -> AsyncGenerator[bytes, None]:
            yield b"first "
            raise RuntimeError("broken")

        async def on_close() -> None:
            closed.append("closed")

        response = EventStreamResponse(body(), asyncio.Event(), on_close=on_close)
        connection = Connection()
        with pytest.raises(RuntimeError, match="broken"):
            await response(SCOPE, connection.receive, connection.send)
        assert (connection.is_complete, closed) == (False, ["closed"])

    asyncio.run(run())


@pytest.mark.parametrize(("leaves", "error"), [(True, ClientGone), (False, ServerStops)])
def test_work_that_nobody_wants_is_undone_first(leaves: bool, error: type[Exception]) -> None:
    async def run() -> None:
        undone = False

        async def work() -> None:
            nonlocal undone
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                undone = True

        connection, stopping = Connection(), asyncio.Event()
        (connection.gone if leaves else stopping).set()
        with pytest.raises(error):
            await while_wanted(work(), connection.receive, stopping)
        assert undone

    asyncio.run(run())


def test_a_browser_that_comes_back_goes_on_where_it_was() -> None:
    """It repeats the query of its first time."""
    assert cursor_of("5", "3") == 5
    assert (cursor_of(None, "3"), cursor_of(None, None)) == (3, 0)
