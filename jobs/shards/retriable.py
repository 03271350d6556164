"""Which rows of a job can be tried again: those whose asking failed, of which the spool still has the prompts."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ...storage.errors import PartMissing
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import JobRecord, PartRecord, ShardRecord
from ...storage.output.address import open_folder
from ...storage.output.folder import OutputFolder
from ...storage.rows.spool import read_shard


@dataclass(frozen=True)
class SpooledShard:
    """A spooled shard some of whose rows are error rows in the data set though they could be asked."""

    number: int
    path: Path
    num_retriable: int


def retriable_shards(ledger: Ledger, job: JobRecord) -> list[SpooledShard]:
    """The spooled shards with rows to try again. Raises StorageError when a spool or a part cannot be read."""
    failed = {part.shard_id for part in ledger.parts(job.id) if part.num_failed}
    shards = ledger.shards(job.id)
    roots = {shard.number: shard for shard in shards if shard.retry_of is None}
    numbers = {_root(shard) for shard in shards if shard.id in failed}
    found = (_retriable(ledger, job, roots[number]) for number in sorted(numbers))
    return [shard for shard in found if shard.num_retriable]


def _root(shard: ShardRecord) -> int:
    return shard.number if shard.retry_of is None else shard.retry_of


def _retriable(ledger: Ledger, job: JobRecord, root: ShardRecord) -> SpooledShard:
    path = Path(root.spool_path)
    if not path.exists():
        # Removed when the job completed, as none of its rows could be tried again.
        return SpooledShard(root.number, path, 0)
    table = read_shard(path)
    left = unretriable_rows(table, open_folder(job.output_dir), ledger.retried_parts(job.id, root.number))
    return SpooledShard(root.number, path, table.num_rows - len(left))


def unretriable_rows(spooled: pa.Table, folder: OutputFolder, parts: Collection[PartRecord]) -> frozenset[int]:
    """The rows of a spooled shard that failed in none of these parts, or that cannot be asked. Raises StorageError.

    Those that are in none of them are in parts of other shards, or will be: their files were lost (`LostRows`).
    """
    refused = spooled.filter(spooled["plan_error"].is_valid())["row"].to_pylist()
    failed = {row for part in parts if part.num_failed for row in _failed_rows(folder, part)}
    return frozenset(spooled["row"].to_pylist()) - failed.difference(refused)


def _failed_rows(folder: OutputFolder, part: PartRecord) -> list[int]:
    table = read_part(folder, part, ["row", "error"])
    rows: list[int] = table.filter(table["error"].is_valid())["row"].to_pylist()
    return rows


def read_part(folder: OutputFolder, part: PartRecord, columns: list[str] | None = None) -> pa.Table:
    """A part, or some of its columns. Raises StorageError; one that is gone says what to do."""
    try:
        return folder.read_part(part.file_name, columns)
    except PartMissing as error:
        raise PartMissing(f"{error}: run --resume makes its rows again") from error
