"""What every input is: rows with numbers, read from the start any number of times."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from ..errors import InputError
from ..rows.columns import SchemaUnifier

if TYPE_CHECKING:
    from .location import Location


class InputRow(NamedTuple):
    """One data row. `row` counts from 0; with an `error`, which names the line, `values` is empty.

    (A tuple, as millions of them are made.)
    `sampling`: how this row is sampled, where the input says so for each; JSON, which only `jobs` reads.
    """

    row: int
    values: dict[str, Any]
    error: str | None = None
    sampling: str | None = None


class InputSource(ABC):
    """An input that can be read any number of times, each time from the start and a little at a time.

    `name` is what the user calls it; `num_read`: how many rows the last iteration has given so far. Iteration raises
    InputError when the input cannot be read on.
    """

    # Whether every row has the columns of `columns`, so that another one can be refused before any work.
    has_fixed_columns = True
    # Whether `fingerprint` is of the rows too, so that other rows make it another input.
    has_fixed_rows = True

    def __init__(self, name: str, limit: int | None) -> None:
        self.name = name
        self.num_read = 0
        self._limit = limit
        self._columns: dict[str, None] = {}

    @property
    def files(self) -> "Sequence[Location]":
        """Those whose rows it has; none where they come from elsewhere."""
        return ()

    @property
    def columns(self) -> list[str]:
        """The columns' names; for JSONL those of the rows read so far, at least of the first."""
        return list(self._columns)

    def unifier(self) -> SchemaUnifier:
        """To observe the values of all rows, for the types of their columns."""
        return SchemaUnifier()

    def __iter__(self) -> Iterator[InputRow]:
        with readable(self.name):
            for number, row in enumerate(islice(self._rows(), self._limit), 1):
                self.num_read = number
                yield row

    @abstractmethod
    def fingerprint(self) -> str:
        """In hexadecimal: what tells this input from another. Raises InputError."""

    @abstractmethod
    def _rows(self) -> Iterator[InputRow]: ...


@contextmanager
def readable(name: str) -> Iterator[None]:
    """The errors of reading an input as InputError."""
    try:
        yield
    except (OSError, EOFError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"input {name} cannot be read: {reason}") from error


def refuse_duplicates(name: str, columns: Sequence[str]) -> None:
    """Raises InputError when two columns have one name."""
    for column, count in Counter(columns).items():
        if count > 1:
            raise InputError(f"input {name} has {count} columns named {column!r}: rename all but one")


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
