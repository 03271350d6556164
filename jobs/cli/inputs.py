"""What `headrace run` reads: a file or folder, a query's rows, or what is piped into it."""

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import typer

from ...storage.readers import InputSource, not_utf8, open_input, open_sql
from ..errors import SpecError

_STDIN = "-"


@contextmanager
def opened_source(
    address: str | None,
    input_format: str,
    sql: str | None,
    query: str | None,
    limit: int | None,
    folder: Path,
) -> Iterator[InputSource]:
    """The input that the options name, for as long as it is read. What is piped in is kept in `folder` meanwhile.

    Raises `SpecError` when they name none or two, `InputError`.
    """
    if (sql is None) != (query is None):
        raise SpecError("--sql and --query belong together: pass both, or an INPUT")
    if (address is None) == (sql is None):
        raise SpecError("pass an INPUT, or --sql and --query: one of the two")
    if sql is not None and query is not None:
        yield open_sql(sql, text_or_file("--query", query), limit)
    elif address == _STDIN:
        with _spooled_stdin(input_format, folder) as path:
            yield open_input(path, limit, name="-")
    elif address is not None:
        yield open_input(address, limit)


@contextmanager
def _spooled_stdin(input_format: str, folder: Path) -> Iterator[Path]:
    """Standard input as a file: it is read several times. Raises `SpecError` where it is closed."""
    # As Python has it where the shell was told <&-, or whoever started this process closed it.
    if (stdin := cast(TextIO | None, sys.stdin)) is None:
        raise SpecError("INPUT is -, and standard input is closed: pipe the rows into it")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="stdin-", suffix=f".{input_format}") as file:
        shutil.copyfileobj(stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def text_or_file(option: str, value: str) -> str:
    """An option's text, or with @ in front the content of the file it names. Raises `SpecError`."""
    if value.startswith("@"):
        return file_text(option, value)
    hint_at_file(option, value, f"{option} {shlex.quote(f'@{value}')}")
    return value


def hint_at_file(option: str, value: str, instead: str) -> bool:
    """Say so where an option's text is the name of a file, which may have been meant; returns whether it is."""
    # Unlike `Path.is_file`, false for a text that is too long to be a name.
    if not os.path.isfile(value.removeprefix("@")):
        return False
    hint = f"{option} is the text {value!r}, not the file of that name: pass {instead} for its content"
    typer.echo(f"headrace: {hint}", err=True)
    return True


def file_text(option: str, value: str) -> str:
    """The content of the file that an option names, with or without @ in front. Raises `SpecError`."""
    try:
        # Notepad and Excel begin files with a byte order mark.
        return Path(os.path.expanduser(value.removeprefix("@"))).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise SpecError(f"{option} {value} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{option} {value} cannot be read: it is {not_utf8(error.object)}") from error
