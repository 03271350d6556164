"""Part files and their commit: written under a temporary name, committed in the ledger, then published.

`DIR/*.parquet` therefore never shows a row that the ledger does not know. An attempt calls `write_part`,
`Ledger.commit_part` and `publish`; if it loses its lease, `discard`. Whoever claims the shard next calls
`recover_shard`, which completes what a killed attempt left between commit and publish.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import PartMissing, StorageError
from .files import sync_folder, write_parquet
from .records import NewPart

_TEMPORARY_NAME = re.compile(r"\.part-(?P<shard>\d+)-(?P<attempt>\d+)-\d+\.parquet\.tmp")

_FINAL_NAME = re.compile(r"part-\d+-(?P<attempt>\d+)-\d+\.parquet")

_TOKEN = (pa.field("token", pa.string()), pa.field("token_id", pa.int32()), pa.field("logprob", pa.float64()))
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, pa.field("top", pa.list_(pa.struct(_TOKEN)))]))
_ALL_ANSWERS = (pa.field("finish_reasons", pa.list_(pa.string())), pa.field("outputs_logprobs", pa.list_(_LOGPROBS)))


@dataclass(frozen=True)
class Recovered:
    """What earlier attempts at a shard have left: the rows that are done, and parts whose files are gone."""

    rows: frozenset[int]
    missing: tuple[str, ...]


def part_file_name(shard_number: int, attempt_id: int, sequence: int) -> str:
    """The final name; `sequence` counts an attempt's parts."""
    return f"part-{shard_number:05d}-{attempt_id:02d}-{sequence:03d}.parquet"


def output_schema(
    input_fields: Sequence[pa.Field],
    choices: Sequence[str] = (),
    with_outputs: bool = False,
    with_logprobs: bool = False,
    with_all_answers: bool = False,
    with_from_cache: bool = False,
) -> pa.Schema:
    """The columns of a part. `input_fields` are the spooled shard's, of `spool.input_fields`.

    `probabilities` has a field for each of the job's `choices`, `outputs` all answers where a row gets several, and
    `logprobs` the first answer's tokens, each with the likeliest in its place. `with_all_answers`: also how each of
    `outputs` ended, and its log-probabilities. `from_cache`: whether the answer is an earlier job's.
    """
    # A struct: not every reader of Parquet knows maps (Hugging Face's `datasets` does not).
    probabilities = pa.field("probabilities", pa.struct([(choice, pa.float64()) for choice in choices]))
    return pa.schema(
        [
            pa.field("row", pa.int64()),
            pa.field("custom_id", pa.string()),
            *input_fields,
            pa.field("output", pa.string()),
            *([pa.field("outputs", pa.list_(pa.string()))] if with_outputs else []),
            pa.field("label", pa.string()),
            pa.field("confidence", pa.float64()),
            *([probabilities] if choices else []),
            *([pa.field("logprobs", _LOGPROBS)] if with_logprobs else []),
            *(_ALL_ANSWERS if with_all_answers else []),
            pa.field("finish_reason", pa.string()),
            pa.field("prompt_tokens", pa.int32()),
            pa.field("cached_tokens", pa.int32()),
            pa.field("completion_tokens", pa.int32()),
            *([pa.field("from_cache", pa.bool_())] if with_from_cache else []),
            pa.field("error", pa.string()),
        ]
    )


def part_summary(file_name: str, table: pa.Table) -> NewPart:
    """What the ledger is told of a part."""
    return NewPart(
        file_name=file_name,
        num_rows=table.num_rows,
        num_failed=table.num_rows - table["error"].null_count,
        prompt_tokens=_sum(table, "prompt_tokens"),
        cached_tokens=_sum(table, "cached_tokens"),
        completion_tokens=_sum(table, "completion_tokens"),
        num_from_cache=_sum(table, "from_cache") if "from_cache" in table.column_names else 0,
    )


def _sum(table: pa.Table, name: str) -> int:
    return int(pc.sum(table[name]).as_py() or 0)


def write_part(folder: Path, file_name: str, table: pa.Table) -> None:
    """Write and sync a part under its temporary name. Raises StorageError, leaving no file."""
    write_parquet(_temporary(folder, file_name), table)


def publish(folder: Path, file_name: str) -> None:
    """Give a committed part its final name; harmless when it has it already. Raises PartMissing."""
    try:
        _temporary(folder, file_name).rename(folder / file_name)
    except FileNotFoundError:
        if not (folder / file_name).exists():
            raise PartMissing(f"part {folder / file_name} is gone") from None
    except OSError as error:
        raise StorageError(f"cannot publish {folder / file_name}: {error.strerror}") from error
    sync_folder(folder)


def committed_file(folder: Path, file_name: str) -> Path | None:
    """Where a committed part is: under its final name, or for a moment still under its temporary one."""
    # The final name once more: it may have got it between the first look and the second.
    places = (folder / file_name, _temporary(folder, file_name), folder / file_name)
    return next((place for place in places if place.exists()), None)


def withdraw(folder: Path, file_name: str) -> None:
    """Remove a part that the ledger no longer knows; does nothing when it is gone."""
    (folder / file_name).unlink(missing_ok=True)


def settle(folder: Path, published: Iterable[str], committed: Collection[str]) -> None:
    """Complete what was committed before a kill: withdraw what was replaced, then publish what replaces it.

    `published` is `published_by` the attempts whose parts the ledger then said were `committed`: a part is committed
    before it is published, so one that is not among these was replaced. Raises StorageError.
    """
    for file_name in set(published) - set(committed):
        withdraw(folder, file_name)
    for file_name in committed:
        with suppress(PartMissing):
            publish(folder, file_name)


def published_by(folder: Path, attempt_ids: Collection[int]) -> list[str]:
    """The final names of the parts that these attempts have written."""
    matches = (_FINAL_NAME.fullmatch(path.name) for path in folder.glob("part-*.parquet"))
    return [match[0] for match in matches if match and int(match["attempt"]) in attempt_ids]


def discard(folder: Path, file_name: str) -> None:
    """Remove a part that was not committed; does nothing when it is gone."""
    _temporary(folder, file_name).unlink(missing_ok=True)


def recover_shard(folder: Path, shard_number: int, attempt_id: int, committed: Sequence[str]) -> Recovered:
    """Publish a shard's committed parts and remove what earlier attempts wrote without committing.

    To be called with the shard's lease held, which keeps those attempts from committing any more. The
    caller drops the `missing` parts from the ledger. Raises StorageError for a damaged part.
    """
    rows: set[int] = set()
    missing = []
    for file_name in committed:
        try:
            publish(folder, file_name)
            rows.update(_read_rows(folder / file_name))
        except PartMissing:
            missing.append(file_name)
    _remove_strays(folder, shard_number, attempt_id)
    return Recovered(rows=frozenset(rows), missing=tuple(missing))


def remove_all_strays(folder: Path, attempt_id: int) -> None:
    """Remove what attempts before this one wrote, at whatever shard, without committing.

    To be called by the attempt that completed the job: all parts are published, and none of these can commit another.
    An attempt that was stopped past its lease may have written after the shard's next attempt had tidied up.
    """
    for path in folder.glob(".part-*.tmp"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and int(match["attempt"]) < attempt_id:
            path.unlink(missing_ok=True)


def _remove_strays(folder: Path, shard_number: int, attempt_id: int) -> None:
    for path in folder.glob(".part-*.tmp"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        if match and int(match["shard"]) == shard_number and int(match["attempt"]) < attempt_id:
            path.unlink(missing_ok=True)


def _read_rows(path: Path) -> list[int]:
    try:
        rows: list[int] = pq.read_table(path, columns=["row"], partitioning=None)["row"].to_pylist()
    except (OSError, pa.ArrowException) as error:
        advice = "delete it and run again with --resume, which generates its rows again"
        raise StorageError(f"part {path} cannot be read ({error}): {advice}") from error
    return rows


def _temporary(folder: Path, file_name: str) -> Path:
    return folder / f".{file_name}.tmp"
