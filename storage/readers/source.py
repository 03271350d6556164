"""What every input is: rows with numbers, read from the start any number of times."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ..rows.columns import SchemaUnifier
from .location import Location
from .readable import readable


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
    def files(self) -> Sequence[Location]:
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
