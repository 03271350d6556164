"""Comma- and tab-separated values."""

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from ..errors import InputError
from .location import Location
from .source import InputRow, InputSource, is_unicode, refuse_duplicates
from .text import refuse_utf16

if TYPE_CHECKING:
    from _csv import Reader as CsvLines

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


class Csv(InputSource):
    """RFC 4180: commas, double quotes, a header. UTF-8. Every value is text, as CSV has no types."""

    def __init__(self, location: Location, limit: int | None, delimiter: str = ",") -> None:
        super().__init__(location.name, limit)
        self._location = location
        self._delimiter = delimiter
        refuse_utf16(location)
        with self._lines() as lines:
            self._columns = dict.fromkeys(self._header(lines))

    def fingerprint(self) -> str:
        return self._location.fingerprint()

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
        if not all(is_unicode(field) for field in fields):
            return InputRow(row, {}, f"line {line_number}: not valid UTF-8")
        return InputRow(row, dict(zip(self._columns, fields, strict=True)))

    @contextmanager
    def _lines(self) -> "Iterator[CsvLines]":
        # The module's limit of 128 KB a field is meant for other files than prompts.
        csv.field_size_limit(sys.maxsize)
        # Bytes that are not UTF-8 spoil their own row only: they come through, and are found there.
        with self._location.open() as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
            yield csv.reader(text, delimiter=self._delimiter, strict=True)

    def _header(self, lines: "CsvLines") -> list[str]:
        try:
            header = next(lines, [])
        except csv.Error as error:
            self._refuse(f"has a header that is not valid CSV ({error}): check its quotes")
        if not header:
            self._refuse("has no header: put the columns' names into the first line")
        if not all(is_unicode(name) for name in header):
            self._refuse("is not UTF-8: save it as UTF-8")
        others = [name for each, name in _DELIMITERS.items() if each != self._delimiter and each in header[0]]
        if len(header) == 1 and others:
            problem = f"has one column, {header[0]!r}: separate fields by {_DELIMITERS[self._delimiter]}"
            self._refuse(f"{problem}, not by {others[0]}")
        names = [name or f"column_{number}" for number, name in enumerate(header, start=1)]
        refuse_duplicates(self.name, names)
        return names

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"input {self.name} {problem}")


def _fields_or_error(lines: "CsvLines") -> "Iterator[list[str] | csv.Error]":
    while True:
        try:
            yield next(lines)
        except csv.Error as error:
            yield error
        except StopIteration:
            return
