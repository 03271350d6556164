"""No request body beyond a limit, whether its length is announced or not."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


class BodyLimit:
    """ASGI middleware. Reading a body of more than `max_bytes` raises an `ApiError` (413) in the one who reads.

    The framework's own limit answers with plain text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        num_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            self._check(int(announced) if announced.isdecimal() else 0)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, receive_within_limit, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = f"the body is larger than {self._max_bytes} bytes: send the rows as several jobs"
            raise ApiError(413, message, "body_too_large")
