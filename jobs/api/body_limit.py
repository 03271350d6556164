"""No request body beyond a limit, whether its length is announced or not, and none that stops short."""

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError

# Of a live request. Nobody else is answered while its JSON is read: two tenths of a second at the most. More than the
# longest context holds, unless it has images.
MAX_LIVE_BYTES = 4 * 2**20
# Between two pieces of a body, as nginx' client_body_timeout.
SILENCE_SECONDS = 60.0

LIVE_ADVICE = (
    "images count as the base64 text that they are sent as: send fewer or smaller ones, or a batch (/v1/batches), a "
    "line of which may be larger"
)
FILE_ADVICE = "split the file"
_IN_PARTS = "send it in parts, or as a file (/v1/files, /jobs/upload)"


class BodyLimit:
    """ASGI middleware. Reading a body of more than `max_bytes` raises an `ApiError` (413) in the one who reads.

    So does one of which nothing more comes for a minute (408), however long it takes in all.
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
        num_bytes, is_complete = 0, False

        async def receive_within_limit() -> Message:
            nonlocal num_bytes, is_complete
            _check(int(announced) if announced.isdecimal() else 0, max_bytes, advice)
            # Who has sent all is asked whether he is still there, which may take as long as the answer.
            message = await (receive() if is_complete else _next_piece(receive))
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            _check(num_bytes, max_bytes, advice)
            return message

        await self._app(scope, receive_within_limit, send)


async def _next_piece(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await receive()
    except TimeoutError as error:
        message = f"nothing more of the body came for {SILENCE_SECONDS:g} s: send it without such pauses"
        given_up = ApiError(408, message, "body_timeout")
        # What may still come is no request.
        given_up.headers = {"Connection": "close"}
        raise given_up from error


def _check(num_bytes: int, max_bytes: int, advice: str) -> None:
    if num_bytes > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes: {advice}", "body_too_large")
