"""Tables on standard output, as `headrace jobs` prints them."""

from collections.abc import Iterable, Sequence
from datetime import datetime

import typer


def print_table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    table = [heading, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        typer.echo("   ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def time_text(seconds: float) -> str:
    """Local time to the second."""
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
