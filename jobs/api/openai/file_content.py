"""The bytes of a file as an answer."""

from pathlib import Path
from typing import Self

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from ....storage.ledger.file_records import FileRecord
from ..errors import ApiError


class FileContent(FileResponse):
    """A file, or the range of it that a request asks for. Raises `ApiError` as long as nothing has been sent.

    The framework's own tells what is wrong with a range as plain text, and that all is well before it opens the file,
    which may be removed until then; what has been opened is sent to its end.
    """

    @classmethod
    def of(cls, path: Path, file: FileRecord) -> Self:
        """Raises `ApiError` (404)."""
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise file_not_found(file.id) from error
        return cls(path, media_type="application/octet-stream", filename=file.filename or file.id, stat_result=found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: list[Message] = []

        async def send_once_open(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._expect_range(message["status"])
                head.append(message)
                return
            while head:
                await send(head.pop())
            await send(message)

        try:
            await super().__call__(scope, receive, send_once_open)
        except FileNotFoundError as error:
            raise file_not_found(Path(self.path).name) from error

    def _expect_range(self, status: int) -> None:
        assert self.stat_result is not None
        size = self.stat_result.st_size
        if status == 416:
            error = ApiError(416, f"Range: the file has {size} bytes", "invalid_range", "Range")
            error.headers = {"Content-Range": f"bytes */{size}"}
            raise error
        if status == 400:
            raise ApiError(400, "Range: must be such as bytes=0-99", "invalid_range", "Range")


def file_not_found(file_id: str) -> ApiError:
    return ApiError(404, f"file {file_id!r} does not exist", "file_not_found", "file_id")
