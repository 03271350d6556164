"""The images of a row's column: bytes as Hugging Face's data sets store them, files, or data URLs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...engine.errors import InvalidRequestError
from ...engine.vision.reading import data_url_bytes, has_images, shortened, split_images
from ...storage.readers import InputSource
from .schemas import JobSpec

_KINDS = 'bytes, {"bytes": ..., "path": ...}, the path of a file, a data URL, or a list of these'

# What begins so may be a data URL; any other text is a path.
_ADDRESSES = ("data:", "http://", "https://")


class NamedFile(bytes):
    """What was read from a path that a row names: the row does not have it itself."""

    @classmethod
    def read(cls, path: str) -> "NamedFile":
        """Raises `InvalidRequestError`."""
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise InvalidRequestError(f"cannot be read from {shortened(path)}: {error.strerror}", "image") from error
        except ValueError as error:
            raise InvalidRequestError(f"is at {shortened(path)!r}, which is no path: {error}", "image") from error


def row_images(values: Mapping[str, Any], column: str, read: Callable[[str], bytes] = NamedFile.read) -> list[bytes]:
    """The files of a row's images, in their order; `read` gives those of which it has the paths.

    Raises `InvalidRequestError` naming the column.
    """
    if column not in values:
        raise InvalidRequestError(f"column {column!r} is missing", "image")
    given = values[column]
    if given is None:
        raise InvalidRequestError(f"column {column!r} is null", "image")
    many = given if isinstance(given, list) else [given]
    try:
        return [_file(each, read) for each in many]
    except InvalidRequestError as error:
        raise InvalidRequestError(f"column {column!r}: an image {error}", "image") from error


def carried_images(spec: JobSpec, values: Mapping[str, Any]) -> list[bytes]:
    """The images of a row's prompt, in their order, as the row has them itself; empty ones for those it has paths of.

    `values` are those of a row that was rendered, or of its columns with images and messages.
    """
    own = row_images(values, spec.image, lambda path: b"") if spec.image is not None else []
    messages = values.get("messages") if spec.prompt is None else None
    if isinstance(messages, str):
        messages = json.loads(messages)
    if messages is None or not has_images(messages):
        return own
    return [each for each in split_images(messages, own)[1] if isinstance(each, bytes)]


def images_fingerprint(source: InputSource, column: str | None) -> str:
    """What tells the image files that rows name from others at the same paths; "" where they name none.

    Also "" for a query: it is the same input whatever rows it returns by now, and whatever images these have.
    Reads the files. Raises InputError when the input cannot be read.
    """
    if column is None or not source.has_fixed_rows:
        return ""
    digest, hashed = hashlib.sha256(), lru_cache(maxsize=1024)(_hashed)
    is_any = False
    for row in source:
        for path in _paths(row.values.get(column)):
            is_any = True
            digest.update(hashed(path))
    return digest.hexdigest() if is_any else ""


def _paths(given: Any) -> Iterator[str]:
    for each in given if isinstance(given, list) else [given]:
        image = (each.get("bytes") or each.get("path")) if isinstance(each, Mapping) else each
        if isinstance(image, str) and image and not image.startswith(_ADDRESSES):
            yield image


def _hashed(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    # A row of a file that cannot be read is an error row, until it can be.
    except (OSError, ValueError):
        return b"none"


def _file(given: Any, read: Callable[[str], bytes]) -> bytes:
    if isinstance(given, bytes):
        return given
    if isinstance(given, Mapping):
        return _file(given.get("bytes") or given.get("path"), read)
    if given == "":
        raise InvalidRequestError(f"is an empty text: it must be {_KINDS}", "image")
    if not isinstance(given, str):
        raise InvalidRequestError(f"must be {_KINDS}, not {type(given).__name__}", "image")
    if given.startswith(_ADDRESSES):
        return data_url_bytes(given)
    return read(given)
