"""The parts of one attempt: rows are committed as they are finished, and come to share a file that is then published.

A part that is committed but not published keeps its hidden name: who asks the ledger finds it, who reads the folder
does not see it yet. Those of a shard become one when it ends, or sooner where it takes long. So a folder has few files,
none of which goes while others read it. (On an object store, which has no hidden names, the merged part takes the place
of the others as a retry's does.)
"""

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ...storage.database import InTransaction
from ...storage.errors import (
    LeaseLost,
    LedgerError,
    LedgerUnavailable,
    PartDamaged,
    PartMissing,
    SinkError,
    StorageError,
)
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import Claim
from ...storage.output.folder import OutputFolder
from ...storage.output.parts import part_file_name, part_summary
from ...storage.output.sinks import SinkSpec, SqlSink
from .patience import Patience
from .retrying import Retrial

logger = logging.getLogger(__name__)

# Of rows that wait for others to share a part with.
_MAX_UNPUBLISHED_BYTES = 64 * 2**20


@dataclass
class PartWriter:
    """Used within `published`, by one thread. Raises LeaseLost, StorageError, `LedgerError` as the ledger does."""

    ledger: Ledger
    claim: Claim
    folder: OutputFolder
    retrial: Retrial
    patience: Patience
    sink: SinkSpec | None
    _num_parts: int = 0
    # By their names, in the order of their commits.
    _unpublished: dict[str, pa.Table] = field(default_factory=dict)
    _publish_seconds: float = 0.0
    _publish_at: float = 0.0

    @contextmanager
    def published(self, publish_seconds: float) -> Iterator[None]:
        """For as long as parts are written. No row waits longer than this to be published, nor beyond the end."""
        self._publish_seconds = publish_seconds
        try:
            yield
        except LedgerUnavailable:
            # A commit may be under way: whoever takes the shard next knows what has come of it.
            raise
        except Exception:
            self._publish_what_is_left()
            raise

    def commit(self, table: pa.Table | None, is_last: bool) -> None:
        """Commit finished rows, if there are any, and publish what is due; `is_last`: everything."""
        if table is not None and not self._unpublished:
            self._publish_at = time.monotonic() + self._publish_seconds
        waiting = [*self._unpublished.values(), *([] if table is None else [table])]
        is_due = is_last or self.claim.retry_of is not None or self._is_due(waiting)
        is_merged = is_due and len(waiting) > 1 and self._merge(waiting, table)
        if table is not None and not is_merged:
            self._unpublished[self._commit(table)] = table
        if is_due:
            self._publish()

    def merge_left(self, names: Sequence[str]) -> None:
        """Publish as one what an earlier attempt at the shard has committed and was killed before publishing.

        What cannot be merged is left to who publishes each.
        """
        with suppress(PartMissing, PartDamaged):
            left = {name: self.folder.read_part(name) for name in self.folder.unpublished(names)}
            # A worker of another version may have written other columns.
            if len(left) > 1 and len({str(table.schema) for table in left.values()}) == 1:
                self._unpublished = left
                try:
                    self._merge(list(left.values()), None)
                    self._publish()
                finally:
                    self._unpublished = {}

    def _is_due(self, waiting: Sequence[pa.Table]) -> bool:
        """Whether rows have waited or grown enough."""
        return time.monotonic() >= self._publish_at or sum(each.nbytes for each in waiting) >= _MAX_UNPUBLISHED_BYTES

    def _publish(self) -> None:
        for name in self._unpublished:
            self.folder.publish(name)
        self._unpublished.clear()

    def _merge(self, tables: Sequence[pa.Table], new: pa.Table | None) -> bool:
        """Have one part in the place of all, of which these rows are new; returns whether there is room for it."""
        name, merged = self._next_name(), pa.concat_tables(tables)
        try:
            self.folder.write_part(name, merged)
        except StorageError as error:
            logger.warning("the parts of shard %s are left as they are: %s", self.claim.shard_id, error)
            return False
        also = None if new is None else self._sink(new)
        before = list(self._unpublished)
        self._record([name], (part_summary(name, merged), (), also, before), new, before)
        self._unpublished = {name: merged}
        self.folder.remove_merged(before)
        return True

    def _commit(self, table: pa.Table) -> str:
        """Write rows as a part and commit it; returns its name, which it gets when it is published."""
        also = self._sink(table)
        name = self._next_name()
        self.patience.with_folder(lambda: self.folder.write_part(name, table))
        replaced = self.retrial.replace(table["row"].to_pylist(), self._next_name)
        written = [name, *(each.rest.file_name for each in replaced if each.rest is not None)]
        self._record(written, (part_summary(name, table), replaced, also), table)
        self.retrial.publish(replaced)
        return name

    def _record(
        self, written: Sequence[str], part: tuple[Any, ...], new: pa.Table | None, merging: Sequence[str] = ()
    ) -> None:
        try:
            self.patience.with_ledger(lambda: self.ledger.leases.commit_part(self.claim, *part))
        except LeaseLost:
            if not self._discard_uncommitted(written, merging) and new is not None:
                self._take_back(new)
            raise

    def _sink(self, table: pa.Table) -> InTransaction | None:
        """Write rows to the job's sink, if it has one, or return what does so in the ledger's transaction."""
        if self.sink is None:
            return None
        sink = SqlSink(self.sink, table.schema)
        upsert = functools.partial(sink.upsert, self.claim.job_id, self.claim.attempt_id, table)
        if self.sink.is_in(self.ledger.database.url):
            return upsert
        self.patience.with_ledger(upsert)
        return None

    def _take_back(self, table: pa.Table) -> None:
        """Have rows that are not committed in no sink of another database: of a job that has ended nobody else would.

        A retry has written over what the rows were before.
        """
        if self.sink is None or self.sink.is_in(self.ledger.database.url) or self.claim.retry_of is not None:
            return
        try:
            rows = table["row"].to_pylist()
            SqlSink(self.sink, table.schema).remove(self.claim.job_id, self.claim.attempt_id, rows)
        except SinkError as error:
            logger.warning("rows of shard %s stay in the sink: %s", self.claim.shard_id, error)

    def _discard_uncommitted(self, names: Sequence[str], merging: Sequence[str]) -> bool:
        """Returns whether they have been committed after all."""
        # A commit whose answer was lost may have been followed by the loss of the lease.
        committed = set(self.ledger.part_names(self.claim.job_id))
        for name in names:
            if name not in committed:
                self.folder.discard(name)
        if are_committed := committed.issuperset(names):
            self.folder.remove_merged(merging)
        return are_committed

    def _publish_what_is_left(self) -> None:
        """As the attempt ends before its shard. What cannot be done now whoever comes next does."""
        if not self._unpublished:
            return
        try:
            for part in self.ledger.parts(self.claim.job_id, self.claim.shard_number):
                if part.attempt_id == self.claim.attempt_id:
                    # Gone where the job has been overwritten.
                    with suppress(PartMissing):
                        self.folder.publish(part.file_name)
        except (LedgerError, StorageError) as error:
            logger.warning("parts of shard %s are not published: %s", self.claim.shard_id, error)

    def _next_name(self) -> str:
        # The attempt's id, not its number: a job that was overwritten may still be writing into the same folder.
        claim = self.claim
        name = part_file_name(claim.job_id, claim.shard_number, claim.attempt_id, self._num_parts)
        self._num_parts += 1
        return name
