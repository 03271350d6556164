"""Files in requests and answers."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from ....storage.ledger.file_records import FileRecord
from .request_body import Body, parse_body

# What OpenAI allows: an hour to thirty days.
ExpirySeconds = Annotated[int, Field(ge=3600, le=2_592_000)]


class ExpiresAfter(Body):
    """`anchor`: the time counts from the file's creation."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class UploadFields(Body):
    """The form of an upload beside its file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None

    @classmethod
    def of_form(cls, fields: dict[str, str]) -> Self:
        """Raises `ApiError` naming the field at fault."""
        values: dict[str, Any] = {}
        for name, value in fields.items():
            outer, _, inner = name.partition("[")
            if inner.endswith("]"):
                values.setdefault(outer, {})[inner[:-1]] = _number(value) if inner == "seconds]" else value
            else:
                values[name] = value
        return parse_body(cls, values)


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text


class FileBody(BaseModel):
    """OpenAI's `File`. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None

    @classmethod
    def of(cls, file: FileRecord) -> Self:
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=int(file.created_at),
            expires_at=None if file.expires_at is None else int(file.expires_at),
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
