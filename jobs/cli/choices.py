"""`--choices`: what an answer may be, as lists with commas or files with a choice a line."""

import csv
from collections.abc import Iterator, Sequence

from ..errors import SpecError
from .inputs import text_or_file

_OPTION = "--choices"


def parse_choices(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Those of every time that the option was given, without spaces around them. Raises `SpecError`."""
    if values is None:
        return None
    return tuple(choice.strip() for value in values for choice in _choices(value))


def _choices(value: str) -> Iterator[str]:
    text = text_or_file(_OPTION, value)
    if value.startswith("@"):
        yield from (line for line in text.splitlines() if line.strip())
        return
    try:
        yield from next(csv.reader([text], skipinitialspace=True, strict=True)) or [""]
    except csv.Error as error:
        raise SpecError(
            f"{_OPTION} must be a list such as 'billing,\"shipping, delayed\"' or @ and a file, not {text!r}: {error}"
        ) from error
