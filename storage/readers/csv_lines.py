"""Values separated by commas, or by what else the header has in their place."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from operator import itemgetter
from typing import NoReturn, TextIO

from ..errors import InputError
from .location import Location
from .readable import is_unicode, refuse_duplicates
from .source import InputRow, InputSource
from .text import expect_text, not_utf8

# As much as a line of JSON: a megabyte of gzip may be one field of a gigabyte, which no process of ours is to hold.
MAX_RECORD_CHARACTERS = 64 * 2**20
# What the parser says in its own words.
_PROBLEMS = {"unexpected end of data": "a quote is not closed, so that all lines after it are part of this row"}
# Where a comma begins a number's decimals spreadsheets write semicolons.
COMMAS_FIRST, TABS_FIRST = (",", ";", "\t"), ("\t", ",", ";")


class Csv(InputSource):
    """RFC 4180: double quotes, a header. Of `delimiters` the first that makes columns of the header is the one.

    UTF-8. Every value is text, as CSV has no types. Records beyond 64 Mi characters are error rows.
    """

    def __init__(self, location: Location, limit: int | None, delimiters: Sequence[str] = COMMAS_FIRST) -> None:
        super().__init__(location.name, limit)
        self._location = location
        expect_text(location)
        self._delimiter = next(filter(self._makes_columns, delimiters), delimiters[0])
        with self._records() as records:
            self._columns = dict.fromkeys(self._header(records))

    @property
    def files(self) -> Sequence[Location]:
        return [self._location]

    def fingerprint(self) -> str:
        return self._location.fingerprint()

    def _rows(self) -> Iterator[InputRow]:
        with self._records() as records:
            records.next()
            row = 0
            while (fields := self._fields_or_problem(records)) is not None:
                # An empty line is one the file ends with, or separates its blocks with.
                if fields != []:
                    yield self._row(row, records.first_line, fields)
                    row += 1

    def _fields_or_problem(self, records: "_Records") -> list[str] | str | None:
        try:
            return records.next()
        except _TooLong as error:
            column = dict(enumerate(self._columns)).get(error.longest_field)
            where = "" if column is None else f", most of them in column {column!r}"
            return f"longer than {MAX_RECORD_CHARACTERS:,} characters{where}"
        except csv.Error as error:
            return f"not valid CSV: {_PROBLEMS.get(str(error), error)}"

    def _row(self, row: int, line_number: int, fields: list[str] | str) -> InputRow:
        if isinstance(fields, str):
            return InputRow(row, {}, f"line {line_number}: {fields}")
        if len(fields) != len(self._columns):
            problem = f"number of fields is {len(fields)}, the header has {len(self._columns)}"
            return InputRow(row, {}, f"line {line_number}: {problem}")
        if (bad := next((field for field in fields if not is_unicode(field)), None)) is not None:
            return InputRow(row, {}, f"line {line_number}: {_not_utf8(bad)}")
        return InputRow(row, dict(zip(self._columns, fields, strict=True)))

    def _makes_columns(self, delimiter: str) -> bool:
        with self._records(delimiter) as records, suppress(_TooLong, csv.Error):
            return len(records.next() or ()) > 1
        return False

    @contextmanager
    def _records(self, delimiter: str | None = None) -> "Iterator[_Records]":
        # Bytes that are not UTF-8 spoil their own row only: they come through, and are found there.
        with self._location.open() as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
            yield _Records(text, delimiter or self._delimiter)

    def _header(self, records: "_Records") -> list[str]:
        try:
            header = records.next()
        except _TooLong:
            self._refuse(f"has a header longer than {MAX_RECORD_CHARACTERS:,} characters: check its quotes")
        except csv.Error as error:
            self._refuse(f"has a header that is not valid CSV ({error}): check its quotes")
        if not header:
            self._refuse("has no header: put the columns' names into the first line")
        if (bad := next((name for name in header if not is_unicode(name)), None)) is not None:
            self._refuse(f"is {_not_utf8(bad)}")
        names = [name or f"column_{number}" for number, name in enumerate(header, start=1)]
        refuse_duplicates(self.name, names)
        return names

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"input {self.name} {problem}")


def _not_utf8(field: str) -> str:
    return not_utf8(field.encode(errors="surrogateescape"))


class _TooLong(Exception):
    """A record that was read past. `longest_field`: the index of the one that has most of its characters."""

    def __init__(self, longest_field: int) -> None:
        super().__init__()
        self.longest_field = longest_field


class _Records:
    """The records of a file. `first_line`: where the last one began."""

    def __init__(self, text: TextIO, delimiter: str) -> None:
        # The module's limit of 128 KB a field is meant for other files than prompts.
        csv.field_size_limit(sys.maxsize)
        self._text = text
        self._delimiter = delimiter
        self._reader = csv.reader(iter(self._line, ""), delimiter=delimiter, strict=True)
        self._lines: list[str] = []
        self._left = 0
        self._next_line = 1
        self.first_line = 1

    def next(self) -> list[str] | None:
        """The fields of the next record, empty those of an empty line; None at the end.

        Raises csv.Error, after which it goes on with the next line, and _TooLong.
        """
        self.first_line = self._next_line
        self._lines.clear()
        self._left = MAX_RECORD_CHARACTERS
        return next(self._reader, None)

    def _line(self) -> str:
        """The next line of a record, for the parser; empty at the end."""
        line = self._text.readline(self._left + 1)
        self._left -= len(line)
        self._next_line += 1
        self._lines.append(line)
        if self._left < 0:
            self._skip()
            raise _TooLong(_longest_field("".join(self._lines), self._delimiter))
        return line

    def _skip(self) -> None:
        """Read on to the end of the record: the line in which as many quotes have closed as were opened."""
        num_quotes = sum(line.count('"') for line in self._lines)
        line = self._lines[-1]
        while line and (num_quotes % 2 or not line.endswith(("\n", "\r"))):
            self._next_line += line.endswith(("\n", "\r"))
            line = self._text.readline(MAX_RECORD_CHARACTERS)
            num_quotes += line.count('"')


def _longest_field(record: str, delimiter: str) -> int:
    found = re.finditer(f'"[^"]*"?|{delimiter}', record)
    ends = (match.start() for match in found if record.startswith(delimiter, match.start()))
    lengths = (end - start for start, end in pairwise(chain((-1,), ends, (len(record),))))
    return max(enumerate(lengths), key=itemgetter(1))[0]
