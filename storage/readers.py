"""Any input as a stream of rows. A bad row is an error row with its line; a bad input raises InputError."""

import codecs
import csv
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import SchemaUnifier, python_values
from .errors import InputError

if TYPE_CHECKING:
    from _csv import Reader as CsvLines

_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class InputRow:
    """One data row. `row` counts from 0; with an `error`, which names the line, `values` is empty."""

    row: int
    values: dict[str, Any]
    error: str | None = None


class InputSource(ABC):
    """An input that can be read any number of times, each time from the start and a little at a time.

    Iteration raises InputError when the file cannot be read on.
    """

    # Whether every row has the columns of `columns`, so that another one can be refused before any work.
    has_fixed_columns = True

    def __init__(self, path: Path, limit: int | None) -> None:
        self.path = path
        self._limit = limit
        self._columns: dict[str, None] = {}

    @property
    def columns(self) -> list[str]:
        """The columns' names; for JSONL those of the rows read so far, at least of the first."""
        return list(self._columns)

    def unifier(self) -> SchemaUnifier:
        """To observe the values of all rows, for the types of their columns."""
        return SchemaUnifier()

    def __iter__(self) -> Iterator[InputRow]:
        with _readable(self.path):
            yield from islice(self._rows(), self._limit)

    @abstractmethod
    def _rows(self) -> Iterator[InputRow]: ...


def open_input(path: str | Path, limit: int | None = None) -> InputSource:
    """The input at `path` by its extension, of its first `limit` rows. Raises InputError, in one line.

    The header and the first row are read, so that an empty or unreadable file is refused here.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit} leaves no rows: pass 1 or more")
    reader = _READERS.get(path.suffix.lower())
    if not path.exists():
        raise InputError(f"input {path} does not exist: check the path")
    if not path.is_file():
        raise InputError(f"input {path} is not a file: name one file")
    if reader is None:
        kind = f"the format {path.suffix!r}" if path.suffix else "a file without an extension"
        raise InputError(f"input {path}: {kind} is not known: use .jsonl, .ndjson, .csv or .parquet")
    with _readable(path):
        source = reader(path, limit)
    if next(iter(source), None) is None:
        raise InputError(f"input {path} has no rows: give it at least one")
    return source


def fingerprint(path: str | Path) -> str:
    """The SHA-256 of the file's content, in hexadecimal. Raises InputError."""
    with _readable(Path(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLines(InputSource):
    """One JSON object a line, UTF-8. Blank lines are no rows."""

    has_fixed_columns = False

    def __init__(self, path: Path, limit: int | None) -> None:
        super().__init__(path, limit)
        _refuse_utf16(path)

    def _rows(self) -> Iterator[InputRow]:
        row = 0
        with self.path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
                if not line.strip():
                    continue
                yield self._row(row, line_number, line)
                row += 1

    def _row(self, row: int, line_number: int, line: bytes) -> InputRow:
        try:
            values = _parse_object(line)
        except _BadRow as error:
            return InputRow(row, {}, f"line {line_number}: {error}")
        self._columns.update(dict.fromkeys(values))
        return InputRow(row, values)


class Csv(InputSource):
    """RFC 4180: commas, double quotes, a header. UTF-8. Every value is text, as CSV has no types."""

    def __init__(self, path: Path, limit: int | None) -> None:
        super().__init__(path, limit)
        _refuse_utf16(path)
        with self._lines() as lines:
            self._columns = dict.fromkeys(self._header(lines))

    def _rows(self) -> Iterator[InputRow]:
        with self._lines() as lines:
            next(lines)
            row = 0
            first_line = lines.line_num + 1
            for fields in _fields_or_error(lines):
                # An empty line is one the file ends with, or separates its blocks with.
                if fields != []:
                    yield self._row(row, first_line, fields)
                    row += 1
                first_line = lines.line_num + 1

    def _row(self, row: int, line_number: int, fields: "Sequence[str] | csv.Error") -> InputRow:
        if isinstance(fields, csv.Error):
            return InputRow(row, {}, f"line {line_number}: not valid CSV: {fields}")
        if len(fields) != len(self._columns):
            problem = f"number of fields is {len(fields)}, the header has {len(self._columns)}"
            return InputRow(row, {}, f"line {line_number}: {problem}")
        if not all(_is_unicode(field) for field in fields):
            return InputRow(row, {}, f"line {line_number}: not valid UTF-8")
        return InputRow(row, dict(zip(self._columns, fields, strict=True)))

    @contextmanager
    def _lines(self) -> "Iterator[CsvLines]":
        # The module's limit of 128 KB a field is meant for other files than prompts.
        csv.field_size_limit(sys.maxsize)
        # Bytes that are not UTF-8 spoil their own row only: they come through, and are found there.
        with self.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield csv.reader(file, strict=True)

    def _header(self, lines: "CsvLines") -> list[str]:
        try:
            header = next(lines, [])
        except csv.Error as error:
            self._refuse(f"has a header that is not valid CSV ({error}): check its quotes")
        if not header:
            self._refuse("has no header: put the columns' names into the first line")
        if not all(_is_unicode(name) for name in header):
            self._refuse("is not UTF-8: save it as UTF-8")
        names = [name or f"column_{number}" for number, name in enumerate(header, start=1)]
        _refuse_duplicates(self.path, names)
        return names

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"input {self.path} {problem}")


class Parquet(InputSource):
    """A Parquet file. Its columns keep their types."""

    def __init__(self, path: Path, limit: int | None) -> None:
        super().__init__(path, limit)
        with pq.ParquetFile(path) as file:
            self._schema: pa.Schema = file.schema_arrow
        _refuse_duplicates(path, self._schema.names)
        self._columns = dict.fromkeys(self._schema.names)

    def unifier(self) -> SchemaUnifier:
        return SchemaUnifier(exact=self._schema)

    def _rows(self) -> Iterator[InputRow]:
        row = 0
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(_PARQUET_BATCH_ROWS):
                columns = [python_values(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    yield InputRow(row, dict(zip(self._columns, values, strict=True)))
                    row += 1


_READERS: dict[str, type[InputSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".csv": Csv,
    ".parquet": Parquet,
}


class _BadRow(Exception):
    pass


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip().decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _BadRow("not valid UTF-8") from error
    except json.JSONDecodeError as error:
        raise _BadRow(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        # Python refuses to convert integers of thousands of digits.
        raise _BadRow("not valid JSON: a number is too long") from error
    except RecursionError as error:
        raise _BadRow("not valid JSON: nested too deep") from error
    if not isinstance(value, dict):
        raise _BadRow(f"not a JSON object but {_JSON_NAMES[type(value)]}")
    # JSON can spell half of a surrogate pair, which is no text. Escapes are rare, so few rows pay for this.
    if b"\\u" in line and not _is_unicode(json.dumps(value, ensure_ascii=False)):
        raise _BadRow("not valid text: an escape is half of a surrogate pair")
    return value


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _refuse_constant(name: str) -> NoReturn:
    raise _BadRow(f"not valid JSON: {name} is not a number in JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fields_or_error(lines: "CsvLines") -> "Iterator[list[str] | csv.Error]":
    while True:
        try:
            yield next(lines)
        except csv.Error as error:
            yield error
        except StopIteration:
            return


def _refuse_duplicates(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"input {path} has {count} columns named {name!r}: rename all but one")


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InputError(f"input {path} is UTF-16: save it as UTF-8")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """The errors of reading a file as InputError."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"input {path} cannot be read: {reason}") from error
