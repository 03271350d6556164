"""JSON lines, and what they have in common with an array's objects."""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from .location import Location
from .readable import is_unicode
from .source import InputRow, InputSource
from .text import expect_text, not_utf8

# As deep as requests to the API may be. Python itself reads deeper ones than it can write again.
_MAX_DEPTH = 200
# A megabyte of gzip may be one line of a gigabyte, which no process of ours is to hold.
MAX_LINE_BYTES = 64 * 2**20
# How errors begin of what may be another format.
NOT_JSON, NO_OBJECT = "not valid JSON", "not a JSON object"
# Of what follows an object.
_MAX_SHOWN = 20
_SCALARS = frozenset((str, int, float, bool, type(None)))


class JsonRows(InputSource):
    """Rows that are JSON objects, each with columns of its own."""

    has_fixed_columns = False

    def __init__(self, location: Location, limit: int | None) -> None:
        super().__init__(location.name, limit)
        self._location = location
        expect_text(location)

    @property
    def files(self) -> Sequence[Location]:
        return [self._location]

    def fingerprint(self) -> str:
        return self._location.fingerprint()

    def _row(self, row: int, line_number: int, text: bytes) -> InputRow:
        try:
            values = parse_object(text)
        except BadRow as error:
            return InputRow(row, {}, f"line {line_number}: {error}")
        if not values.keys() <= self._columns.keys():
            self._columns.update(dict.fromkeys(values))
        return InputRow(row, values)


class JsonLines(JsonRows):
    """One JSON object a line, UTF-8. Blank lines are no rows, lines beyond 64 MiB error rows."""

    def _rows(self) -> Iterator[InputRow]:
        with self._location.open() as file:
            for row, (line_number, line) in enumerate(numbered_lines(file)):
                if len(line) > MAX_LINE_BYTES:
                    yield InputRow(row, {}, f"line {line_number}: longer than {MAX_LINE_BYTES:,} bytes")
                else:
                    yield self._row(row, line_number, line)


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, counted from 1, blank ones too. One that is too long is cut, a byte behind that."""
    for number, line in enumerate(_lines(file, MAX_LINE_BYTES), start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield number, line


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Of a line that has more, one byte more than so many."""
    while line := file.readline(max_bytes + 1):
        yield line
        # What is left of it.
        while len(line) > max_bytes and not line.endswith(b"\n"):
            line = file.readline(max_bytes + 1)


def are_columns(values: Mapping[str, Any]) -> bool:
    """Whether a row is a whole table by columns, of which each has its values by the same numbers of rows."""
    columns = list(values.values())
    if not columns or not all(isinstance(column, dict) for column in columns):
        return False
    first = columns[0].keys()
    return bool(first) and all(key.isdecimal() for key in first) and all(column.keys() == first for column in columns)


class BadRow(Exception):
    """A text that is no JSON object; the message says why."""


def parse_object(line: bytes) -> dict[str, Any]:
    """A line's object, or an array's element. Raises BadRow."""
    try:
        value = _decoded(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise BadRow(not_utf8(line)) from error
    except json.JSONDecodeError as error:
        raise BadRow(f"{NOT_JSON}: {_problem(error)}") from error
    except ValueError as error:
        # Python refuses to convert integers of thousands of digits.
        raise BadRow(f"{NOT_JSON}: a number is too long") from error
    except RecursionError as error:
        raise BadRow(f"{NOT_JSON}: nested too deep") from error
    if not isinstance(value, dict):
        raise BadRow(f"{NO_OBJECT} but {_JSON_NAMES[type(value)]}")
    if not _SCALARS.issuperset(map(type, value.values())) and _is_too_deep(value, line):
        raise BadRow(f"lists and objects are nested deeper than {_MAX_DEPTH}")
    # JSON can spell half of a surrogate pair, which is no text. Escapes are rare, so few rows pay for this.
    if b"\\u" in line and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise BadRow("not valid text: an escape is half of a surrogate pair")
    return value


def _problem(error: json.JSONDecodeError) -> str:
    # Some of the messages end with "starting at".
    problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if error.msg != "Extra data":
        return problem
    extra = error.doc[error.pos :]
    return f"{problem}: {extra if len(extra) <= _MAX_SHOWN else extra[:_MAX_SHOWN] + '…'!r}"


def _is_too_deep(value: Any, line: bytes) -> bool:
    # Nearly always.
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return False
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _decoded(text: str) -> Any:
    """As the decoder's `decode`, which looks for white space around each text with two regular expressions."""
    if text.startswith("{"):
        value, end = _DECODER.raw_decode(text)
        if end == len(text):
            return value
    return _DECODER.decode(text)


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def _refuse_constant(name: str) -> NoReturn:
    raise BadRow(f"not JSON, which has no {name}: write null")


# One for all lines: `json.loads` makes another for each.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
