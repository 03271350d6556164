"""Each answer says which request it belongs to: `x-request-id`, as OpenAI's do, so that clients can tell it."""

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..live.requests import new_request_id

HEADER = "x-request-id"
_RAW_HEADER = HEADER.encode()
# A WebSocket that is refused is answered as over HTTP.
_STARTS = frozenset(("http.response.start", "websocket.http.response.start"))


class RequestIds:
    """ASGI middleware: names each request in its state, and in its answer's headers where these do not say it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = new_request_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                headers = message.get("headers", ())
                if not any(name == _RAW_HEADER for name, _ in headers):
                    message["headers"] = [*headers, (_RAW_HEADER, scope["state"]["request_id"].encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(connection: HTTPConnection) -> str:
    """The name of a request that has come through `RequestIds`."""
    request_id: str = connection.state.request_id
    return request_id


def name_request(connection: HTTPConnection, request_id: str) -> None:
    """What is answered from now on, errors included, is known by the id that its tokens are kept under."""
    connection.state.request_id = request_id
