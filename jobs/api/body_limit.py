"""No request body beyond a limit, whether its length is announced or not."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# Of a live request. Nobody else is answered while its JSON is read: two tenths of a second at the most. More than the
# longest context holds.
MAX_LIVE_BYTES = 4 * 2**20


class BodyLimit:
    """ASGI middleware. Reading a body of more than `max_bytes` raises an `ApiError` (413) in the one who reads.

    `other_paths`: those with a limit of their own. The framework's own limit answers with plain text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, other_paths: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._other_paths = other_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        max_bytes = self._other_paths.get(scope["path"], self._max_bytes)
        num_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            _check(int(announced) if announced.isdecimal() else 0, max_bytes)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            _check(num_bytes, max_bytes)
            return message

        await self._app(scope, receive_within_limit, send)


def _check(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes: send it in parts", "body_too_large")
