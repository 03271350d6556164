"""`--choices`: what an answer may be, as lists with commas or files with a choice a line."""

import csv
from collections.abc import Iterator, Sequence

import typer

from ..errors import SpecError
from .inputs import text_or_file

_OPTION = "--choices"


def parse_choices(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """Those of every time that the option was given, without spaces around them. Raises `SpecError`."""
    if values is None:
        return None
    choices = tuple(choice.strip() for value in values for choice in _choices(value))
    if len(choices) == 1 and choices[0]:
        remark = f"{choices[0]!r}, for all answers: write commas between several"
        typer.echo(f"headrace: {_OPTION} is one choice, {remark}", err=True)
    return choices


def _choices(value: str) -> Iterator[str]:
    text = text_or_file(_OPTION, value)
    if value.startswith("@"):
        yield from (line for line in text.splitlines() if line.strip())
        return
    try:
        yield from next(csv.reader([text], skipinitialspace=True, strict=True)) or [""]
    except csv.Error as error:
        problem = "it has several lines" if len(text.splitlines()) > 1 else error
        raise SpecError(
            f"{_OPTION} must be a list such as 'billing,\"shipping, delayed\"' or @ and a file, not {text!r}: {problem}"
        ) from error
