"""One JSON array of objects, as many tools save their data sets."""

import codecs
import json
from collections.abc import Iterator
from io import TextIOWrapper
from typing import NoReturn

from ..errors import InputError
from .json_lines import JsonRows
from .location import Location
from .source import InputRow

_PIECE_CHARACTERS = 2**20
# A damaged element looks like one that goes on, so that a reader without a limit would take in all that follows.
_MAX_ELEMENT_CHARACTERS = 64 * 2**20
_SPACE = " \t\r\n"
# Finds where an element ends; what is wrong within it is its row's error.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
_ELEMENT_BEGINS_WITH = frozenset('{["-0123456789tfnNI')


def is_json_array(location: Location) -> bool:
    """Whether the first character is an array's bracket."""
    with location.open() as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8)
        return start.lstrip().startswith(b"[")


class JsonArray(JsonRows):
    """An array of objects, UTF-8, read an element at a time.

    An element that is no object is an error row. Where one ends cannot be told once the syntax is broken: iteration
    then raises InputError, which names the line.
    """

    def _rows(self) -> Iterator[InputRow]:
        # Bytes that are not UTF-8 spoil their own row only: they come through, and are found there.
        with self._location.open() as file:
            text = _Text(self.name, TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=""))
            for row, (line_number, element) in enumerate(text.elements()):
                yield self._row(row, line_number, element.encode(errors="surrogateescape"))


class _Text:
    """What is read of the file and not yet used."""

    def __init__(self, name: str, file: TextIOWrapper) -> None:
        self._name = name
        self._file = file
        self._piece = ""
        self._at = 0
        self._line_number = 1
        self._has_ended = False

    def elements(self) -> Iterator[tuple[int, str]]:
        """Each element's first line and its text. Raises InputError."""
        self._take("[")
        if self._next() == "]":
            self._take("]")
        else:
            yield self._element()
            while self._take(",]") == ",":
                yield self._element()
        if self._next():
            self._refuse("something follows the array: keep one array a file, or one object a line in a .jsonl")

    def _next(self) -> str:
        """The next character that is no space, not taken yet; empty at the end of the file."""
        while True:
            start = self._at
            while self._at < len(self._piece) and self._piece[self._at] in _SPACE:
                self._at += 1
            self._line_number += self._piece.count("\n", start, self._at)
            if self._at < len(self._piece):
                return self._piece[self._at]
            if self._has_ended:
                return ""
            self._read(_PIECE_CHARACTERS)

    def _take(self, expected: str) -> str:
        found = self._next()
        if not found:
            self._refuse("the file ends within the array")
        if found not in expected:
            self._refuse(f"expected {' or '.join(expected)}, not {found}")
        self._at += 1
        return found

    def _element(self) -> tuple[int, str]:
        if (first := self._next()) not in _ELEMENT_BEGINS_WITH:
            self._refuse(f"expected an element, not {first}" if first else "the file ends within the array")
        while True:
            try:
                _, end = _DECODER.raw_decode(self._piece, self._at)
            except RecursionError:
                self._refuse("not valid JSON: nested too deep")
            except json.JSONDecodeError as error:
                if self._has_ended or len(self._piece) - self._at > _MAX_ELEMENT_CHARACTERS:
                    self._line_number += self._piece.count("\n", self._at, error.pos)
                    self._refuse(f"not valid JSON: {error.msg.removesuffix(' at')}")
            else:
                # A number may go on behind what is read.
                if end < len(self._piece) or self._has_ended:
                    break
            # Twice as much each time: what is read is looked through from its start again.
            self._read(max(_PIECE_CHARACTERS, len(self._piece) - self._at))
        line_number, element = self._line_number, self._piece[self._at : end]
        self._line_number += element.count("\n")
        self._at = end
        return line_number, element

    def _read(self, num_characters: int) -> None:
        more = self._file.read(num_characters)
        self._has_ended = not more
        self._piece = self._piece[self._at :] + more
        self._at = 0

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"input {self._name} cannot be read, line {self._line_number}: {problem}")
