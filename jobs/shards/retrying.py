"""Trying failed rows again: a later shard over the same spooled rows, whose answers take their error rows' places.

Parts are never changed. When rows are answered anew, each part that held their error rows gives way to one without
them, in the transaction that commits the answers. On a disk the old part is removed before its rows come back in new
ones: who reads the folder may miss a row for a moment but never sees it twice. On an object store, where new parts
show at once, it is removed after. Who asks the ledger which parts there are sees each row once at any moment.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import Claim, PartRecord, Replacement
from ...storage.output.folder import OutputFolder
from ...storage.output.parts import part_summary, published_by, settle
from .retriable import read_part, unretriable_rows


@dataclass(frozen=True)
class Retrial:
    """What an attempt at a shard has to look after that tries another's rows again; nothing for other shards."""

    ledger: Ledger
    claim: Claim
    folder: OutputFolder

    def settle(self) -> None:
        """Complete what an attempt that was killed had committed; before anything else. Raises StorageError."""
        # Before the first attempt all other shards with these rows are done, their last attempts have seen to it.
        if (retry_of := self.claim.retry_of) is None or self.claim.attempt_number == 1:
            return
        # Only theirs: should the job have been overwritten, the folder is another's by now.
        attempt_ids = self.ledger.retrying_attempts(self.claim.job_id, retry_of)
        published = published_by(self.folder, self.claim.job_id, attempt_ids)
        settle(self.folder, published, self.committed())

    def committed(self) -> list[str]:
        """The parts that attempts at this shard may have committed, those in the place of others' among them."""
        if (retry_of := self.claim.retry_of) is None:
            return []
        return [part.file_name for part in self.ledger.retried_parts(self.claim.job_id, retry_of)]

    def rows_to_leave(self, spooled: pa.Table) -> frozenset[int]:
        """The rows that other shards have answered, or that cannot be asked."""
        if self.claim.retry_of is None:
            return frozenset()
        return unretriable_rows(spooled, self.folder, self._others())

    def replace(self, rows: Collection[int], next_name: Callable[[], str]) -> list[Replacement]:
        """Write what stays of the parts that hold these rows' errors, to be committed. Raises StorageError."""
        if self.claim.retry_of is None:
            return []
        wanted = pa.array(list(rows), pa.int64())
        return [
            self._replace(part, wanted, next_name)
            for part in self._others()
            if pc.any(pc.is_in(_column(self.folder, part, "row"), wanted)).as_py()
        ]

    def publish(self, replaced: Iterable[Replacement]) -> None:
        """What stays takes its part's place: the commit has taken place. Raises StorageError."""
        for each in replaced:
            self.folder.withdraw(each.old.file_name)
            if each.rest is not None:
                self.folder.publish(each.rest.file_name)

    def _replace(self, part: PartRecord, rows: pa.Array, next_name: Callable[[], str]) -> Replacement:
        table = read_part(self.folder, part)
        rest = table.filter(pc.invert(pc.is_in(table["row"], rows)))
        if not rest.num_rows:
            return Replacement(part, None)
        name = next_name()
        self.folder.write_part(name, rest)
        return Replacement(part, part_summary(name, rest))

    def _others(self) -> list[PartRecord]:
        """The parts of other shards that hold errors. Rows whose files are gone are not this shard's to make again."""
        assert self.claim.retry_of is not None
        family = self.ledger.retried_parts(self.claim.job_id, self.claim.retry_of)
        others = [part for part in family if part.num_failed and part.shard_id != self.claim.shard_id]
        there = set(self.folder.find_parts([part.file_name for part in others]))
        return [part for part in others if part.file_name in there]


def _column(folder: OutputFolder, part: PartRecord, name: str) -> pa.ChunkedArray:
    return read_part(folder, part, [name])[name]
