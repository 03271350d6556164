"""Part files and their commit: written, committed in the ledger, then published.

An attempt calls `OutputFolder.write_part`, `Leases.commit_part` and `publish`; if it loses its lease, `discard`. Parts
that it has committed but not published it may merge: one is written and committed in their place, then `remove_merged`.
Whoever claims the shard next calls `recover_shard`, which completes what a killed attempt left in between. A folder on
a disk shows no part before it is published; on an object store only the ledger tells.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import PartDamaged, PartMissing
from ..ledger.records import NewPart
from .folder import OutputFolder

_FINAL_NAME = re.compile(r"part-(?P<shard>\d+)-(?P<attempt>\d+)-\d+(-(?P<job>[0-9a-f]{8}))?\.parquet")

_TOKEN = (pa.field("token", pa.string()), pa.field("token_id", pa.int32()), pa.field("logprob", pa.float64()))
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, pa.field("top", pa.list_(pa.struct(_TOKEN)))]))
_DOUBT = (pa.field("margin", pa.float64()), pa.field("entropy", pa.float64()))
_REASONING = (pa.field("reasoning", pa.string()), pa.field("reasoning_tokens", pa.int32()))
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
_VOTE = pa.struct([("answer", pa.string()), ("count", pa.int32())])
_VOTES = (pa.field("votes", pa.list_(_VOTE)), pa.field("agreement", pa.float64()))
_RECEIPT = pa.struct(
    [
        ("weights", pa.string()),
        ("seed", pa.int64()),
        ("attempt", pa.int32()),
        ("dtype", pa.string()),
        ("quantization", pa.string()),
        ("kv_cache_dtype", pa.string()),
        ("device", pa.string()),
        ("headrace", pa.string()),
        ("torch", pa.string()),
    ]
)
# Tables of rows that were made before there were these get them.
ADDED_NAMES = frozenset((*(field.name for field in _DOUBT), "receipt", "parsed", "tool_calls"))
_ALL_ANSWERS = (
    pa.field("finish_reasons", pa.list_(pa.string())),
    # As JSON: some are texts, others token ids. Null where the answers, or the only one, have none.
    pa.field("stop_reasons", pa.list_(pa.string())),
    pa.field("outputs_logprobs", pa.list_(_LOGPROBS)),
    pa.field("outputs_reasoning", pa.list_(pa.string())),
)


@dataclass(frozen=True)
class Recovered:
    """What earlier attempts at a shard have left: the rows that are done, and parts whose files are gone."""

    rows: frozenset[int]
    missing: tuple[str, ...]


class WrittenPart(NamedTuple):
    """What a part's name says."""

    file_name: str
    shard_number: int
    attempt_id: int


def part_file_name(job_id: str, shard_number: int, attempt_id: int, sequence: int) -> str:
    """The final name, which no other job's part has, whatever its ledger; `sequence` counts an attempt's parts."""
    return f"part-{shard_number:05d}-{attempt_id:02d}-{sequence:03d}-{_mark(job_id)}.parquet"


def _mark(job_id: str) -> str:
    """What tells a job's parts from those of all others that may ever be in the same folder."""
    return hashlib.blake2b(job_id.encode(), digest_size=4).hexdigest()


def output_schema(
    input_fields: Sequence[pa.Field],
    choices: Sequence[str] = (),
    with_outputs: bool = False,
    with_logprobs: bool = False,
    with_all_answers: bool = False,
    with_prompt_logprobs: bool = False,
    with_from_cache: bool = False,
    with_votes: bool = False,
    with_reasoning: bool = False,
    with_doubt_and_receipt: bool = False,
    parsed: pa.DataType | None = None,
    with_tool_calls: bool = False,
) -> pa.Schema:
    """The columns of a part. `input_fields` are the spooled shard's, of `spool.input_fields`.

    `probabilities` has a field for each of the job's `choices`, `outputs` all answers where a row gets several, and
    `logprobs` the first answer's tokens, each with the likeliest in its place. `with_all_answers`: also how each of
    `outputs` ended, its log-probabilities, and its thinking. `prompt_logprobs`: as `logprobs`, of the prompt's tokens;
    nothing is known of the first. `from_cache`: whether the answer is an earlier job's. `with_doubt_and_receipt`: the
    columns that data sets have from version 2 on. `parsed`: the type of an answer that is JSON. `with_tool_calls`: an
    answer's calls, as OpenAI's messages have them. docs/data-set.md says what is in each.
    """
    # A struct: not every reader of Parquet knows maps (Hugging Face's `datasets` does not).
    probabilities = pa.field("probabilities", pa.struct([(choice, pa.float64()) for choice in choices]))
    return pa.schema(
        [
            pa.field("row", pa.int64()),
            pa.field("custom_id", pa.string()),
            *input_fields,
            pa.field("output", pa.string()),
            *([] if parsed is None else [pa.field("parsed", parsed)]),
            *([pa.field("tool_calls", pa.list_(_CALL))] if with_tool_calls else []),
            *([pa.field("outputs", pa.list_(pa.string()))] if with_outputs else []),
            *(_REASONING if with_reasoning else []),
            pa.field("label", pa.string()),
            pa.field("confidence", pa.float64()),
            *(_DOUBT if with_doubt_and_receipt else []),
            *([probabilities] if choices else []),
            *(_VOTES if with_votes else []),
            *([pa.field("logprobs", _LOGPROBS)] if with_logprobs else []),
            *(_ALL_ANSWERS if with_all_answers else []),
            *([pa.field("prompt_logprobs", _LOGPROBS)] if with_prompt_logprobs else []),
            pa.field("finish_reason", pa.string()),
            pa.field("prompt_tokens", pa.int32()),
            pa.field("cached_tokens", pa.int32()),
            pa.field("completion_tokens", pa.int32()),
            *([pa.field("from_cache", pa.bool_())] if with_from_cache else []),
            *([pa.field("receipt", _RECEIPT)] if with_doubt_and_receipt else []),
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
        num_truncated=int(pc.sum(pc.equal(table["finish_reason"], "length")).as_py() or 0),
    )


def _sum(table: pa.Table, name: str) -> int:
    return int(pc.sum(table[name]).as_py() or 0)


def settle(folder: OutputFolder, published: Iterable[str], committed: Collection[str]) -> None:
    """Complete what was committed before a kill: withdraw what was replaced, then publish what replaces it.

    `published` is `published_by` the attempts whose parts the ledger then said were `committed`: a part is committed
    before it is published, so one that is not among these was replaced, or never committed. Raises StorageError.
    """
    for file_name in set(published) - set(committed):
        folder.withdraw(file_name)
    for file_name in committed:
        with suppress(PartMissing):
            folder.publish(file_name)


def published_by(folder: OutputFolder, job_id: str, attempt_ids: Collection[int]) -> list[str]:
    """The final names of the parts that these attempts at the job have written."""
    written = parts_of([job_id], folder.part_names())
    return [part.file_name for part in written if part.attempt_id in attempt_ids]


def recover_shard(
    folder: OutputFolder,
    job_id: str,
    shard_number: int,
    attempt_id: int,
    committed: Sequence[str],
    also_committed: Collection[str] = (),
) -> Recovered:
    """Publish a shard's committed parts and remove what earlier attempts wrote without committing.

    To be called with the shard's lease held, which keeps those attempts from committing any more. The
    caller drops the `missing` parts from the ledger. `also_committed`: what the shard's attempts have committed for
    others. Raises StorageError, PartDamaged.
    """
    rows: set[int] = set()
    missing = []
    for file_name in committed:
        try:
            folder.publish(file_name)
            rows.update(_read_rows(folder, file_name))
        except PartMissing:
            missing.append(file_name)
    known = {*committed, *also_committed}
    for part in parts_of([job_id], folder.maybe_uncommitted()):
        if part.shard_number == shard_number and part.attempt_id < attempt_id and part.file_name not in known:
            folder.discard(part.file_name)
    return Recovered(rows=frozenset(rows), missing=tuple(missing))


def is_part(name: str) -> bool:
    """Whether a file has the name of a published part, of whichever job."""
    return _FINAL_NAME.fullmatch(name) is not None


def parts_of(job_ids: Collection[str], names: Iterable[str]) -> list[WrittenPart]:
    """Those of a folder's files that are parts of these jobs, or of any: before jobs were marked they did not say."""
    marks = {None, *map(_mark, job_ids)}
    matches = (_FINAL_NAME.fullmatch(name) for name in names)
    own = (match for match in matches if match and match["job"] in marks)
    return [WrittenPart(match[0], int(match["shard"]), int(match["attempt"])) for match in own]


def shard_number_of(file_name: str) -> int:
    """Of the shard whose attempt wrote a part, by its name; rows that were tried again have others than at first."""
    match = _FINAL_NAME.fullmatch(file_name)
    assert match is not None
    return int(match["shard"])


def _read_rows(folder: OutputFolder, file_name: str) -> list[int]:
    try:
        rows: list[int] = folder.read_part(file_name, ["row"])["row"].to_pylist()
    except PartDamaged as error:
        raise PartDamaged(f"{error}: delete it, and its rows are generated again") from error
    return rows
