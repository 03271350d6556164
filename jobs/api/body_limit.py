"""No request body beyond a limit, whether its length is announced or not."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# Of a live request. Nobody else is answered while its JSON is read: two tenths of a second at the most. More than the
# longest context holds, unless it has images.
MAX_LIVE_BYTES = 4 * 2**20

LIVE_ADVICE = (
    "images count as the base64 text that they are sent as: send fewer or smaller ones, or a batch (/v1/batches), a "
    "line of which may be larger"
)
FILE_ADVICE = "split the file"
_IN_PARTS = "send it in parts, or as a file (/v1/files, /jobs/upload)"


class BodyLimit:
    """ASGI middleware. Reading a body of more than `max_bytes` raises an `ApiError` (413) in the one who reads.

    `other_paths`: those with a limit of their own, and what to do beyond it. The framework's own limit
    answers with plain text.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, other_paths: Mapping[str, tuple[int, str]]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._other_paths = other_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        max_bytes, advice = self._other_paths.get(scope["path"], (self._max_bytes, _IN_PARTS))
        num_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal num_bytes
            _check(int(announced) if announced.isdecimal() else 0, max_bytes, advice)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            _check(num_bytes, max_bytes, advice)
            return message

        await self._app(scope, receive_within_limit, send)


def _check(num_bytes: int, max_bytes: int, advice: str) -> None:
    if num_bytes > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes: {advice}", "body_too_large")
