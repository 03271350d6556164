"""The images of a row's column: bytes as Hugging Face's data sets store them, files, or data URLs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...engine.errors import InvalidRequestError
from ...engine.vision.reading import data_url_bytes, shortened

_KINDS = 'bytes, {"bytes": ..., "path": ...}, the path of a file, a data URL, or a list of these'


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


def _file(given: Any) -> bytes:
    if isinstance(given, bytes):
        return given
    if isinstance(given, Mapping):
        return _file(given.get("bytes") or given.get("path"))
    if given == "":
        raise InvalidRequestError(f"is an empty text: it must be {_KINDS}", "image")
    if not isinstance(given, str):
        raise InvalidRequestError(f"must be {_KINDS}, not {type(given).__name__}", "image")
    # An address, which may be a data URL; else it is a path.
    if given.startswith(("data:", "http://", "https://")):
        return data_url_bytes(given)
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"cannot be read from {shortened(given)}: {error.strerror}", "image") from error
    except ValueError as error:
        raise InvalidRequestError(f"is at {shortened(given)!r}, which is no path: {error}", "image") from error
