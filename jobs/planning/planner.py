"""Rows to shards: render, tokenize, put rows with a common prefix next to each other, cut.

A job may be larger than memory: between the first step and the last, its rows are in an `ExternalSorter`.
"""

import pickle
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import pyarrow as pa

from ...engine.choices import build_choice_tree
from ...engine.hub import locate_model
from ...engine.model_config import ModelConfig
from ...engine.tokenizer import Tokenizer
from ...storage.columns import SchemaUnifier, custom_id_of
from ...storage.external_sort import ExternalSorter
from ...storage.readers import InputRow, InputSource
from ...storage.spool import PlannedRow
from ..schemas import JobSpec
from .ahead import map_ahead
from .collector import leave_alone_what_is_there
from .custom_ids import CustomIds
from .rendering import PromptRenderer, RowError
from .shard_cutter import PrefixSharing, ShardCutter

# How the error of a prompt begins that is too long for the model.
TOO_LONG = "prompt has"
_BATCH_ROWS = 1024
_SORT_MEMORY_BYTES = 256 * 1024**2


@dataclass
class Plan:
    """A job's rows in the order in which to run them, and the types of the input's columns.

    Rows that can not be asked are in shards too, with their error: every row takes the same way to the output.
    """

    schema: pa.Schema
    num_rows: int
    num_errors: int
    _sorted_rows: ExternalSorter
    has_row_sampling: bool
    # Rows whose custom_id a row before has, with that row.
    _duplicates: dict[int, int]
    _cutter: ShardCutter

    def shards(self) -> Iterator[list[PlannedRow]]:
        """The rows of one shard after the other, read from disk as they are taken; once."""
        return self._cutter.cut(self._checked(_planned(key, payload)) for key, payload in self._sorted_rows)

    def _checked(self, row: PlannedRow) -> PlannedRow:
        if (first := self._duplicates.get(row.row)) is None:
            return row
        error = f"custom_id {row.custom_id!r} is also that of row {first}"
        return replace(row, prompt_token_ids=None, error=error)

    @property
    def sharing(self) -> PrefixSharing:
        """What the shards taken so far share."""
        return self._cutter.sharing


@dataclass(frozen=True)
class Planner:
    """Plans the rows of one job for one model.

    `shard_rows`: the most rows a shard has. `sort_folder`: where rows go that do not fit into `sort_memory_bytes`.
    """

    spec: JobSpec
    model: ModelConfig
    tokenizer: Tokenizer
    shard_rows: int
    sort_folder: Path
    sort_memory_bytes: int = _SORT_MEMORY_BYTES

    def check(self, source: InputSource) -> PromptRenderer:
        """Refuse what can be refused before any work. Raises `SpecError`, `InputError`."""
        self.spec.sampling.check_vocabulary(self.model.vocab_size)
        if self.spec.choices is not None:
            end = self.model.eos_token_ids[0] if self.model.eos_token_ids else None
            build_choice_tree(self.tokenizer.encode_choices(self.spec.choices), end)
        return PromptRenderer(self.spec, self.tokenizer, _columns(source))

    @contextmanager
    def plan(self, source: InputSource) -> Iterator[Plan]:
        """The plan, for as long as its shards are read.

        Raises `SpecError` when no row of the input can be rendered, `InputError` when it cannot be read on,
        `StorageError` when there is no room to sort in.
        """
        renderer = self.check(source)
        unifier = source.unifier()
        num_rows = num_errors = 0
        with leave_alone_what_is_there(), self._sorter() as sorter, self._sorter() as id_sorter:
            ids = CustomIds(id_sorter)
            for row in self._plan_rows(renderer, unifier, source):
                sorter.add(*_item(row))
                ids.add(row)
                num_rows += 1
                num_errors += row.error is not None
            duplicates = ids.duplicates()
            num_errors += len(duplicates)
            cutter = ShardCutter(self.shard_rows)
            own = self.spec.samples_each_row
            yield Plan(unifier.schema(), num_rows, num_errors, sorter, own, duplicates, cutter)

    def _sorter(self) -> ExternalSorter:
        return ExternalSorter(self.sort_folder, self.sort_memory_bytes)

    def _plan_rows(self, renderer: PromptRenderer, unifier: SchemaUnifier, source: InputSource) -> Iterator[PlannedRow]:
        """All rows in the input's order. One batch is tokenized while the next is read and rendered."""

        def encode(rendered: _Rendered) -> tuple[_Rendered, list[list[int]]]:
            return rendered, self.tokenizer.encode_batch(rendered.texts, renderer.adds_special_tokens)

        batches = (_Rendered.of(renderer, unifier, rows) for rows in _batches(source))
        for rendered, token_ids in map_ahead(encode, batches):
            yield from self._plan_batch(rendered, iter(token_ids))

    def _plan_batch(self, rendered: "_Rendered", token_ids: Iterator[list[int]]) -> Iterator[PlannedRow]:
        for row in rendered.rows:
            problem = rendered.errors.get(row.row)
            ids = None if problem else rendered.encoded.get(row.row) or next(token_ids)
            if ids is not None and (problem := self._length_error(len(ids))):
                ids = None
            custom_id = custom_id_of(row.values, row.row)
            yield PlannedRow(row.row, custom_id, row.values, ids, problem, row.sampling)

    def _length_error(self, num_tokens: int) -> str | None:
        limit = self.model.max_position_embeddings
        if num_tokens == 0:
            return "prompt is empty"
        if num_tokens >= limit:
            return f"{TOO_LONG} {num_tokens} tokens; the model's context holds {limit} with the answer"
        return None


@dataclass(frozen=True)
class _Rendered:
    """A batch of rows and their prompts: `texts`, in order, of all that are neither in `errors` nor `encoded` already.

    Both of these by the row's number.
    """

    rows: list[InputRow]
    texts: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    encoded: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, renderer: PromptRenderer, unifier: SchemaUnifier, rows: list[InputRow]) -> "_Rendered":
        batch = cls(rows)
        for row in rows:
            unifier.observe(row.values)
            try:
                prompt = _render(renderer, row)
            except RowError as error:
                batch.errors[row.row] = str(error)
            else:
                if isinstance(prompt, str):
                    batch.texts.append(prompt)
                else:
                    batch.encoded[row.row] = prompt
        return batch


def make_planner(spec: JobSpec, shard_rows: int, sort_folder: Path) -> Planner:
    """A planner for the job's model. Raises `ModelError`.

    Its `spec` names the commit that a branch is at now: every attempt at the job has the same weights.
    """
    located = locate_model(spec.model, with_weights=False)
    return Planner(
        spec.model_copy(update={"model": located.name}),
        ModelConfig.from_pretrained(located.folder),
        Tokenizer.from_pretrained(located.folder),
        shard_rows,
        sort_folder,
    )


def _columns(source: InputSource) -> list[str]:
    """The input's columns; where every row may have its own, those of the first rows."""
    if not source.has_fixed_columns:
        deque(islice(source, _BATCH_ROWS), maxlen=0)
    return source.columns


def _render(renderer: PromptRenderer, row: InputRow) -> str | list[int]:
    if row.error is not None:
        raise RowError(row.error)
    return renderer.render(row.values)


def _item(row: PlannedRow) -> tuple[bytes, bytes]:
    """What the sorter is given: the tokens as the key, so that prompts with a long common beginning are neighbours.

    Rows without tokens come first: they cost the engine nothing.
    """
    key = b"" if row.prompt_token_ids is None else _big_endian(array("i", row.prompt_token_ids)).tobytes()
    payload = (row.row, row.custom_id, row.values, row.error, row.sampling)
    return key, pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)


def _planned(key: bytes, payload: bytes) -> PlannedRow:
    number, custom_id, values, error, sampling = pickle.loads(payload)
    token_ids = None if error else _big_endian(array("i", key))
    return PlannedRow(number, custom_id, values, token_ids, error, sampling)


def _big_endian(token_ids: "array[int]") -> "array[int]":
    """Turned from this machine's order of bytes to big-endian, or back: as bytes, they then sort as numbers do."""
    if sys.byteorder == "little":
        token_ids.byteswap()
    return token_ids


def _batches(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH_ROWS)):
        yield batch
