"""A data set's `custom_id`s are each there once: rows that repeat one are found, however many rows there are."""

from itertools import groupby
from operator import itemgetter

from ...storage.errors import InputError
from ...storage.external_sort import ExternalSorter
from .batch_planner import PlannedBatch

# More than this is no slip: the column does not name rows.
_MAX_DUPLICATES = 100_000
_custom_id = itemgetter(0)


class CustomIds:
    """Takes every row in the input's order; keeps their ids in `sorter`, once a row brings one of its own."""

    def __init__(self, sorter: ExternalSorter) -> None:
        self._sorter = sorter
        self._num_rows = 0
        self._has_own_ids = False

    def add(self, batch: PlannedBatch) -> None:
        if batch.own_ids and not self._has_own_ids:
            self._has_own_ids = True
            # The rows before are named by their numbers, which this column may repeat.
            for number in range(self._num_rows):
                self._sorter.add(str(number).encode(), _payload(number, is_error=False))
        first, self._num_rows = self._num_rows, self._num_rows + len(batch.items)
        if self._has_own_ids:
            for number in range(first, self._num_rows):
                custom_id = batch.own_ids.get(number, str(number))
                self._sorter.add(custom_id.encode(), _payload(number, number in batch.errors))

    def duplicates(self) -> dict[int, int]:
        """The rows that repeat an id, each with the first row that has it; rows with another error are left out.

        Raises `InputError` when there are so many that the column cannot be meant as an id.
        """
        found: dict[int, int] = {}
        for _, items in groupby(self._sorter, key=_custom_id):
            (_, first), *others = items
            first_row = int.from_bytes(first[:8])
            found |= {int.from_bytes(payload[:8]): first_row for _, payload in others if not payload[8]}
            if len(found) > _MAX_DUPLICATES:
                raise InputError(
                    f"column 'custom_id': more than {_MAX_DUPLICATES:,} rows repeat the id of another row: rename the "
                    "column if it does not name rows"
                )
        return found


def _payload(row: int, is_error: bool) -> bytes:
    return row.to_bytes(8) + bytes([is_error])
