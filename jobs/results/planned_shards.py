"""Whose rows a part of a data set may have: those of the shard that it was written for."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord
from ...storage.output.parts import shard_number_of
from ...storage.rows.planned_rows import read_planned_shards


@dataclass
class PlannedShards:
    """Of a job of which it is not known, all rows and parts are shard 0's."""

    ledger: Ledger
    job_id: str
    is_known: bool
    num_shards: int
    # The shards that try others' rows again, and those others, as of when the newest of `_met` was met.
    _retries: dict[int, int] = field(default_factory=dict)
    _met: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, ledger: Ledger, job: JobRecord) -> tuple["PlannedShards", npt.NDArray[np.int32]]:
        """A job's, and each row's shard. Raises `LedgerError`."""
        folder = ledger.spool_folder(job.id)
        shards = None if folder is None else read_planned_shards(folder, job.num_rows)
        of_rows = np.zeros(job.num_rows, np.int32) if shards is None else shards
        return cls(ledger, job.id, shards is not None, int(of_rows.max(initial=0)) + 1), of_rows

    def of_parts(self, names: Iterable[str]) -> list[int]:
        """Whose rows these parts have: for rows that were tried again, those of the first. Raises `LedgerError`."""
        # Of a retry that has been deleted meanwhile nothing is known.
        return [shard if shard < self.num_shards else 0 for shard in self._first_shards(names)]

    def knows(self, names: Iterable[str]) -> bool:
        """Whether these parts' shards were there then: some are added for rows that got lost. Raises `LedgerError`."""
        return all(shard < self.num_shards for shard in self._first_shards(names))

    def _first_shards(self, names: Iterable[str]) -> list[int]:
        if not self.is_known:
            return [0 for _ in names]
        numbers = list(map(shard_number_of, names))
        # Whatever their numbers are: shards of rows that got lost may follow, and be planned.
        if not self._met.issuperset(numbers):
            self._retries = self.ledger.retries(self.job_id)
            self._met.update(numbers)
        return [self._retries.get(number, number) for number in numbers]
