"""The spool: planned rows on their way from the planner to a worker, one Parquet file a shard."""

import shutil
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import SpoolDamaged
from ..files import write_parquet
from .columns import carried_names, column_array

_LEADING = (pa.field("row", pa.int64()), pa.field("custom_id", pa.string()))
_TRAILING = (pa.field("prompt_token_ids", pa.list_(pa.int32())), pa.field("plan_error", pa.string()))
# Only of shards with images in their prompts: their files, null where an input's column has it. None has this name.
_IMAGES = pa.field("headrace.prompt_images", pa.list_(pa.large_binary()))
# Only of shards whose rows say themselves how they are sampled.
_ROW_SAMPLING = pa.field("row_sampling", pa.string())
_OWN_NAMES = frozenset(field.name for field in (*_LEADING, *_TRAILING, _ROW_SAMPLING, _IMAGES))


class PlannedRow(NamedTuple):
    """A row to generate, or with `error` one to report. `values` are the input's, under the input's names.

    (A tuple, as millions of them are made.)
    `sampling`: how this row is sampled, where its job leaves that to the rows; JSON, which only `jobs` reads.
    `images`: the files of those in its prompt, in their order; None in the place of one that `values` has.
    """

    row: int
    custom_id: str
    values: dict[str, Any]
    prompt_token_ids: Sequence[int] | None
    error: str | None
    sampling: str | None = None
    images: Sequence[bytes | None] | None = None


def lock_of(spool: Path) -> Path:
    """What is held while a job's spool is written and the job recorded. Killed meanwhile, one leaves it there."""
    return spool.with_name(f"{spool.name}.lock")


def lost_lock_of(spool: Path) -> Path:
    """What is held while rows of a completed job that got lost are spooled again, until its new shards are recorded."""
    return lock_of(spool.with_name(f"{spool.name}.lost"))


def discard_spool(spool: Path) -> None:
    """Remove a job's spool and the lock that was left beside it, as far as that can be done."""
    shutil.rmtree(spool, ignore_errors=True)
    with suppress(OSError):
        lock_of(spool).unlink(missing_ok=True)


def write_shard(path: Path, rows: Sequence[PlannedRow], schema: pa.Schema) -> None:
    """Write and sync one shard, creating its folder. `schema` is the job's, of `SchemaUnifier.schema()`.

    Raises StorageError.
    """
    names = carried_names(schema.names)
    numbers, custom_ids, values, prompts, errors, samplings, images = zip(*rows, strict=True)
    columns = [
        pa.array(numbers, pa.int64()),
        pa.array(custom_ids, pa.string()),
        *(column_array([each.get(field.name) for each in values], field) for field in schema if field.name in names),
        _token_lists(prompts),
        pa.array(errors, pa.string()),
    ]
    fields = [*_LEADING, *carried_fields(schema), *_TRAILING]
    if any(samplings):
        columns.append(pa.array(samplings, pa.string()))
        fields.append(_ROW_SAMPLING)
    if any(images):
        columns.append(pa.array(images, _IMAGES.type))
        fields.append(_IMAGES)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_parquet(path, pa.table(columns, schema=pa.schema(fields)))


def carried_fields(schema: pa.Schema) -> list[pa.Field]:
    """A job's input columns under the names that the output uses."""
    carried = carried_names(schema.names)
    return [field.with_name(carried[field.name]) for field in schema if field.name in carried]


def _token_lists(prompts: Sequence[Sequence[int] | None]) -> pa.ListArray:
    lengths = [0 if tokens is None else len(tokens) for tokens in prompts]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    flat = array("i")
    for tokens in prompts:
        flat.extend(tokens or ())
    missing = pa.array([tokens is None for tokens in prompts])
    return pa.ListArray.from_arrays(offsets, np.asarray(flat), type=_TRAILING[0].type, mask=missing)


def prompt_token_arrays(table: pa.Table) -> "list[array[int]]":
    """The prompts of a spooled shard's rows; empty where there is none."""
    kind = _TRAILING[0].type
    column = pa.concat_arrays(table["prompt_token_ids"].cast(kind).chunks or [pa.array([], kind)])
    # A list would have an object for each token, which takes ten times the memory and the time.
    tokens, offsets = array("i", column.values.to_numpy().tobytes()), column.offsets.to_numpy().tolist()
    return [tokens[start:end] for start, end in pairwise(offsets)]


def row_samplings(table: pa.Table) -> Iterable[str | None]:
    """How the rows of a spooled shard are sampled, as `PlannedRow` has it."""
    return table[_ROW_SAMPLING.name].to_pylist() if _ROW_SAMPLING.name in table.column_names else repeat(None)


def prompt_images(table: pa.Table) -> Iterable[Sequence[bytes | None]]:
    """The files of the images in the prompts of a spooled shard's rows, as `PlannedRow` has them."""
    if _IMAGES.name not in table.column_names:
        return repeat(())
    return (row or () for row in table[_IMAGES.name].to_pylist())


def without_images(table: pa.Table) -> pa.Table:
    """A spooled shard without the files of its prompts' images."""
    return table.drop_columns([_IMAGES.name]) if _IMAGES.name in table.column_names else table


def read_shard(path: Path) -> pa.Table:
    """All rows of a shard. Raises SpoolDamaged, also when it is gone or only cannot be read now."""
    try:
        # Not `read_table`, which imports half of pyarrow first, in each of a worker's threads at the same time.
        with pq.ParquetFile(path) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        # The system's own refusals have a number, Arrow's have none.
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
            cause = f"mend what keeps it from being read ({error})"
            raise SpoolDamaged(f"cannot read the spooled shard {path}: {cause}") from error
        raise SpoolDamaged(f"cannot read the spooled shard {path}: submit the job again ({error})") from error


def input_fields(schema: pa.Schema) -> list[pa.Field]:
    """The input's columns among those of a spooled shard, under the names that the output uses."""
    return [field for field in schema if field.name not in _OWN_NAMES]
