"""The images of a row's column: bytes as Hugging Face's data sets store them, files, or data URLs."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...engine.errors import InvalidRequestError
from ...engine.vision.reading import data_url_bytes, shortened
from ...storage.readers import InputSource

_KINDS = 'bytes, {"bytes": ..., "path": ...}, the path of a file, a data URL, or a list of these'

# What begins so may be a data URL; any other text is a path.
_ADDRESSES = ("data:", "http://", "https://")


def row_images(values: Mapping[str, Any], column: str) -> list[bytes]:
    """The files of a row's images, in their order. Raises `InvalidRequestError` naming the column."""
    if column not in values:
        raise InvalidRequestError(f"column {column!r} is missing", "image")
    given = values[column]
    if given is None:
        raise InvalidRequestError(f"column {column!r} is null", "image")
    many = given if isinstance(given, list) else [given]
    try:
        return [_file(each) for each in many]
    except InvalidRequestError as error:
        raise InvalidRequestError(f"column {column!r}: an image {error}", "image") from error


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


def _file(given: Any) -> bytes:
    if isinstance(given, bytes):
        return given
    if isinstance(given, Mapping):
        return _file(given.get("bytes") or given.get("path"))
    if given == "":
        raise InvalidRequestError(f"is an empty text: it must be {_KINDS}", "image")
    if not isinstance(given, str):
        raise InvalidRequestError(f"must be {_KINDS}, not {type(given).__name__}", "image")
    if given.startswith(_ADDRESSES):
        return data_url_bytes(given)
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot be read from {shortened(given)}: {error.strerror}", "image") from error
    except ValueError as error:
        raise InvalidRequestError(f"is at {shortened(given)!r}, which is no path: {error}", "image") from error
