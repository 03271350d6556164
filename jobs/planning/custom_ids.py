"""A data set's `custom_id`s are each there once: rows that repeat one are found, however many rows there are."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ...storage.errors import InputError
from ...storage.rows.external_sort import ExternalSorter, Item
from ...storage.rows.spool import PlannedRow
from .rows_planner import PlannedRun, planned_row, row_number

# More than this is no slip: the column does not name rows.
_MAX_DUPLICATES = 100_000
_TILDE = b"~"
_custom_id = itemgetter(0)


@dataclass(frozen=True)
class Repeats:
    """What is to be done about ids that more than one row has.

    `duplicates`: rows that repeat one, each with the first row that has it. `renamed`: rows that can not be asked and
    bring no id, whose number another row brings as its own; `mark` is more tildes than any id of the input begins with.
    """

    duplicates: dict[int, int]
    renamed: frozenset[int]
    mark: str

    def __bool__(self) -> bool:
        return bool(self.duplicates or self.renamed)

    def of(self, items: Sequence[Item]) -> "Repeats":
        """What says enough about these rows: as much as there are of them, however long the input is."""
        if len(self.duplicates) + len(self.renamed) <= len(items):
            return self
        numbers = list(map(row_number, items))
        duplicates = {row: self.duplicates[row] for row in numbers if row in self.duplicates}
        return Repeats(duplicates, self.renamed.intersection(numbers), self.mark)

    def rows(self, items: Iterable[Item]) -> list[PlannedRow]:
        """The rows that the items were made of, those that repeat an id with their error or their new id."""
        rows = map(planned_row, items)
        return list(map(self._settled, rows)) if self else list(rows)

    def _settled(self, row: PlannedRow) -> PlannedRow:
        if row.row in self.renamed:
            return row._replace(custom_id=f"{self.mark}{row.row}")
        if (first := self.duplicates.get(row.row)) is None:
            return row
        error = f"custom_id {row.custom_id!r} is also that of row {first}"
        return row._replace(prompt_token_ids=None, error=error)


class CustomIds:
    """Takes every row in the input's order; keeps their ids in `sorter`, once a row brings one of its own."""

    def __init__(self, sorter: ExternalSorter) -> None:
        self._sorter = sorter
        self._num_rows = 0
        self._has_own_ids = False
        # The rows at fault of before.
        self._early_errors = array("q")

    def add(self, run: PlannedRun) -> None:
        if run.own_ids and not self._has_own_ids:
            self._has_own_ids = True
            self._add_early_rows()
        first, self._num_rows = self._num_rows, self._num_rows + len(run.items)
        if not self._has_own_ids:
            self._early_errors.extend(sorted(run.errors))
            return
        numbers = range(first, self._num_rows)
        self._sorter.extend(_item(number, run.own_ids.get(number), number in run.errors) for number in numbers)

    def _add_early_rows(self) -> None:
        """They are named by their numbers, which this column may repeat."""
        errors = frozenset(self._early_errors)
        for number in range(self._num_rows):
            self._sorter.add(*_item(number, None, number in errors))

    def repeats(self) -> Repeats:
        """The rows that repeat an id; those with another error are left out.

        Raises `InputError` when there are so many that the column cannot be meant as an id.
        """
        found: dict[int, int] = {}
        renamed: set[int] = set()
        most_tildes = 0
        for custom_id, items in groupby(self._sorter, key=_custom_id):
            most_tildes = max(most_tildes, len(custom_id) - len(custom_id.lstrip(_TILDE)))
            payloads = [payload for _, payload in items]
            # Nearly always.
            if len(payloads) == 1:
                continue
            claims = list(map(_Claim.unpack, payloads))
            renamed.update(claim.row for claim in claims if claim.gives_way)
            kept, *repeating = (claim for claim in claims if not claim.gives_way)
            found |= {claim.row: kept.row for claim in repeating if not claim.is_error}
            if len(found) > _MAX_DUPLICATES:
                raise InputError(
                    f"column 'custom_id': more than {_MAX_DUPLICATES:,} rows repeat the id of another row: rename the "
                    "column if it does not name rows"
                )
        return Repeats(found, frozenset(renamed), "~" * (most_tildes + 1))


# What a claim says beside its row; they are kept as one number.
_ERROR, _OWN = 1, 2


class _Claim(NamedTuple):
    """A row's claim to an id. `is_own`: the row brings it; else it is the row's number."""

    row: int
    is_error: bool
    is_own: bool

    @property
    def gives_way(self) -> bool:
        """The number of a row that can not be asked says nothing to anybody: it leaves it to whoever brings it."""
        return self.is_error and not self.is_own

    @classmethod
    def unpack(cls, payload: bytes) -> "_Claim":
        number = int.from_bytes(payload)
        return cls(number >> 2, bool(number & _ERROR), bool(number & _OWN))


def _item(row: int, own_id: str | None, is_error: bool) -> Item:
    """A row's claim to its own id, else to its number, as it is sorted. `_Claim.unpack` reads the second of them."""
    if own_id is None:
        return str(row).encode(), (row << 2 | is_error).to_bytes(8)
    return own_id.encode(), (row << 2 | _OWN | is_error).to_bytes(8)
