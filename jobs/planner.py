"""Rows to shards: render, tokenize, put rows with a common prefix next to each other, cut."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from ..engine.choices import build_choice_tree
from ..engine.config import ModelConfig
from ..engine.tokenizer import Tokenizer
from ..storage.columns import SchemaUnifier, custom_id_of
from ..storage.readers import InputRow, InputSource
from ..storage.spool import PlannedRow
from .rendering import PromptRenderer, RowError
from .schemas import JobSpec

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """A job's shards in the order in which to run them, and the types of the input's columns.

    Rows that can not be asked are in shards too, with their error: every row takes the same way to the output.
    """

    shards: list[list[PlannedRow]]
    schema: pa.Schema

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.shards))

    @property
    def num_errors(self) -> int:
        return sum(row.error is not None for shard in self.shards for row in shard)


@dataclass(frozen=True)
class Planner:
    """Plans the rows of one job for one model. `shard_rows`: the most rows a shard has."""

    spec: JobSpec
    model: ModelConfig
    tokenizer: Tokenizer
    shard_rows: int

    def check(self, source: InputSource) -> PromptRenderer:
        """Refuse what can be refused before any work. Raises `SpecError`, `InputError`."""
        if self.spec.choices is not None:
            end = self.model.eos_token_ids[0] if self.model.eos_token_ids else None
            build_choice_tree(self.tokenizer.encode_choices(self.spec.choices), end)
        return PromptRenderer(self.spec, self.tokenizer, _columns(source))

    def plan(self, source: InputSource) -> Plan:
        """Raises `SpecError` when no row of the input can be rendered, `InputError` when it cannot be read on."""
        renderer = self.check(source)
        unifier = source.unifier()
        rows: list[PlannedRow] = []
        for batch in _batches(source):
            rows += self._plan_batch(renderer, unifier, batch)
        rows.sort(key=_prefix_order)
        shards = [rows[start : start + self.shard_rows] for start in range(0, len(rows), self.shard_rows)]
        return Plan(shards, unifier.schema())

    def _plan_batch(
        self, renderer: PromptRenderer, unifier: SchemaUnifier, batch: list[InputRow]
    ) -> Iterator[PlannedRow]:
        texts: list[str] = []
        errors: dict[int, str] = {}
        for row in batch:
            unifier.observe(row.values)
            try:
                texts.append(_render(renderer, row))
            except RowError as error:
                errors[row.row] = str(error)
        token_ids = iter(self.tokenizer.encode_batch(texts, renderer.adds_special_tokens))
        for row in batch:
            if row.row in errors:
                yield _planned(row, None, errors[row.row])
            else:
                ids = next(token_ids)
                too_long = self._length_error(len(ids))
                yield _planned(row, None if too_long else ids, too_long)

    def _length_error(self, num_tokens: int) -> str | None:
        limit = self.model.max_position_embeddings
        if num_tokens == 0:
            return "prompt is empty"
        if num_tokens >= limit:
            return f"prompt has {num_tokens} tokens; the model's context holds {limit} with the answer"
        return None


def _columns(source: InputSource) -> list[str]:
    """The input's columns; where every row may have its own, those of the first rows."""
    if not source.has_fixed_columns:
        deque(islice(source, _BATCH_ROWS), maxlen=0)
    return source.columns


def _render(renderer: PromptRenderer, row: InputRow) -> str:
    if row.error is not None:
        raise RowError(row.error)
    return renderer.render(row.values)


def _planned(row: InputRow, token_ids: list[int] | None, error: str | None) -> PlannedRow:
    return PlannedRow(row.row, custom_id_of(row.values, row.row), row.values, token_ids, error)


def _prefix_order(row: PlannedRow) -> bytes:
    """Sorts token sequences so that those with a long common beginning are neighbours.

    Big-endian bytes compare as the numbers do. Rows without tokens come first: they cost the engine nothing.
    """
    return np.asarray(row.prompt_token_ids or [], dtype=">u4").tobytes()


def _batches(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH_ROWS)):
        yield batch
