"""An upload as it comes in: a form whose file goes to disk piece by piece, whatever its size."""

from collections.abc import AsyncIterator
from typing import Any

from anyio.to_thread import run_sync
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...batches.files import FileTooLarge, IncomingFile
from ..errors import ApiError

FILE = "file"
# Handed to the disk at a time: a thread for each piece of the network's would cost more than the writing.
_PIECE_BYTES = 2**20
_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 8 * 2**10
_MAX_FILENAME = 512


class Upload:
    """A form's fields; its `file` is written into `incoming`, and known by the name that the client gives it."""

    def __init__(self, content_type: str, incoming: IncomingFile) -> None:
        """Raises `ApiError` for what is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(415, "send a form (multipart/form-data) with 'purpose' and 'file'", "unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._incoming = incoming
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._header_value = bytearray()
        self._is_complete = False
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise _malformed(str(error)) from error

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Take in the whole form. Raises `ApiError` when it is malformed or too large, StorageError."""
        piece = bytearray()
        async for chunk in stream:
            piece += chunk
            if len(piece) >= _PIECE_BYTES:
                await run_sync(self.feed, bytes(piece))
                piece.clear()
        await run_sync(self.feed, bytes(piece))
        if not self._is_complete:
            raise _malformed("it ends too early")

    def feed(self, data: bytes) -> None:
        """Raises `ApiError`, StorageError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from error
        except FileTooLarge as error:
            raise ApiError(413, str(error), "file_too_large", FILE) from error

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._name = ""
        self._value.clear()
        if len(self.fields) >= _MAX_FIELDS:
            raise _malformed(f"it has more than {_MAX_FIELDS} fields")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value.decode("latin-1"))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == FILE:
                self._begin_file(options.get(b"filename"))
        self._header.clear()
        self._header_value.clear()

    def _begin_file(self, filename: bytes | None) -> None:
        if self.filename is not None:
            raise ApiError(400, "file: one at a time", "invalid_value", FILE)
        if filename is None:
            raise ApiError(400, "file: a file is expected, with a filename, not a text", "invalid_type", FILE)
        self.filename = filename.decode("utf-8", "replace").replace("\0", "\ufffd")[:_MAX_FILENAME]

    def _end_headers(self) -> None:
        if not self._name:
            raise _malformed("a part has no name")
        if self._name in self.fields:
            raise ApiError(400, f"{self._name}: is there twice", "invalid_value", self._name[:_MAX_FILENAME])

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._incoming.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise _malformed(f"a field is longer than {_MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the form can not be read: {reason}", "invalid_form")
