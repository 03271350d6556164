"""Rows to shards: render, tokenize, put rows with a common prefix next to each other, cut.

A job may be larger than memory: between the first step and the last, its rows are in an `ExternalSorter`.
"""

import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...engine.checkpoints.hub import locate_model
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.collector import leave_alone_what_is_there
from ...engine.errors import InvalidRequestError
from ...engine.structured.choices import build_choice_tree
from ...engine.text.tokenizer import Tokenizer
from ...storage.errors import Argument, InputError, StorageError
from ...storage.ledger.records import NewShard
from ...storage.readers import InputRow, InputSource
from ...storage.readers.json_lines import NO_OBJECT, NOT_JSON
from ...storage.rows.columns import REASONING_NAMES, SchemaUnifier
from ...storage.rows.external_sort import ExternalSorter, Item
from ...storage.rows.planned_rows import planned_rows
from ...storage.rows.spool import PlannedRow
from ..calls.formats import SPECIAL_TOKENS_HIDE_CALLS, CallFormat
from ..errors import SpecError
from ..shards.row_calls import has_calls
from ..spec.schemas import JobSpec
from ..spec.tool_choice import is_forced
from .custom_ids import CustomIds, Repeats
from .planning_process import Recipe
from .rendering import PromptRenderer
from .rows_planner import RowsPlanner, row_number
from .shard_cutter import PrefixSharing, ShardCutter, shard_rows_of
from .side_by_side import SideBySide
from .work import WriteShard

_RUN_ROWS = 1024
# A run of long rows ends earlier.
_RUN_CHARACTERS = 4 * 1024**2
# Where rows name files, how large these are is not known before they are read.
_RUN_ROWS_WITH_IMAGES = 32
_SORT_MEMORY_BYTES = 256 * 1024**2


@dataclass
class Plan:
    """A job's rows in the order in which to run them, and the types of the input's columns.

    `answer_tokens`: the most that all answers together may have, where each row has a sampling of its own.
    Rows that can not be asked are in shards too, with their error: every row takes the same way to the output.
    """

    schema: pa.Schema
    num_rows: int
    num_errors: int
    answer_tokens: int | None
    _sorted_rows: ExternalSorter
    _repeats: Repeats
    _cutter: ShardCutter
    _side_by_side: SideBySide

    def shards(self) -> Iterator[list[PlannedRow]]:
        """The rows of one shard after the other, read from disk as they are taken; once."""
        return map(self._repeats.rows, self._cutter.cut(self._sorted_rows))

    def spool(self, folder: Path) -> list[NewShard]:
        """Write the shards of `shards`, in the place of what is in `folder`; of those that fail nothing is left.

        Raises `StorageError`, `OSError`.
        """
        shutil.rmtree(folder, ignore_errors=True)
        try:
            return list(self._spooled(folder))
        except (StorageError, OSError):
            # Of a disk that is full it has what is left, and a helper may be about to write more.
            self._side_by_side.end_helpers()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def spool_some(self, folder: Path, are_wanted: npt.NDArray[np.bool_], first: int) -> list[NewShard]:
        """Write shards of some rows, [num_rows], beside what is in `folder`; they are numbered from `first` on.

        What is there of them when it fails is written over when it is tried again. Raises `StorageError`, `OSError`.
        """
        wanted = (item for item in self._sorted_rows if are_wanted[row_number(item)])
        return [spooled.shard for spooled in self._side_by_side.results(self._writes(folder, wanted, first))]

    def _spooled(self, folder: Path) -> Iterator[NewShard]:
        with planned_rows(folder) as planned:
            for spooled in self._side_by_side.results(self._writes(folder, self._sorted_rows)):
                planned.add(spooled.shard.number, spooled.rows)
                yield spooled.shard

    def _writes(self, folder: Path, items: Iterable[Item], first: int = 0) -> Iterator[WriteShard]:
        for number, together in enumerate(self._cutter.cut(items), first):
            path = folder / f"shard-{number:05d}.parquet"
            yield WriteShard(number, path, together, self._repeats.of(together), self.schema)

    @property
    def sharing(self) -> PrefixSharing:
        """What the shards taken so far share."""
        return self._cutter.sharing


@dataclass(frozen=True)
class Planner:
    """Plans the rows of one job for one model.

    `shard_rows`: the most rows a shard has; None for what suits the job's size. `sort_folder`: where rows go that do
    not fit into `sort_memory_bytes`.
    """

    spec: JobSpec
    model: ModelConfig
    tokenizer: Tokenizer
    shard_rows: int | None
    sort_folder: Path
    sort_memory_bytes: int = _SORT_MEMORY_BYTES

    def check(self, source: InputSource) -> PromptRenderer:
        """Refuse what can be refused before any work; what is left is what `plan` needs to begin.

        Raises `SpecError`, `InputError`.
        """
        self.spec.sampling.check_vocabulary(self.model.vocab_size)
        self._check_bad_words()
        columns = _columns(source)
        if not self.spec.sampling.skip_special_tokens:
            self._check_calls(columns)
        if self.spec.sampling.reasoning:
            self._check_reasoning(columns)
        if self.spec.choices is not None:
            end = self.model.eos_token_ids[0] if self.model.eos_token_ids else None
            build_choice_tree(self.tokenizer.encode_choices(self.spec.choices), end)
        with _told_from_another_format(source):
            return PromptRenderer(self.spec, self.tokenizer, columns)

    def _check_bad_words(self) -> None:
        option = Argument("bad_words")
        try:
            self.tokenizer.encode_bad_words(self.spec.sampling.bad_words)
        except InvalidRequestError as error:
            raise SpecError(option, str(error).removeprefix(option.name), field="sampling.bad_words") from error

    def _check_calls(self, columns: Sequence[str]) -> None:
        """Where special tokens are written out: whether a call of a tool would still be found."""
        if not has_calls(self.spec, columns) or is_forced(self.spec.tool_choice):
            return
        # Where the form is not known, nothing is looked for.
        with suppress(InvalidRequestError):
            if CallFormat.of_model(self.tokenizer, {}).needs_bare_text:
                option = Argument("skip_special_tokens")
                raise SpecError(option, f": {SPECIAL_TOKENS_HIDE_CALLS}", field=f"sampling.{option.name}")

    def _check_reasoning(self, columns: Sequence[str]) -> None:
        option = Argument("reasoning")
        try:
            self.tokenizer.reasoning(True)
        except InvalidRequestError as error:
            raise SpecError(option, str(error).removeprefix(option.name), field="sampling.reasoning") from error
        if taken := [name for name in columns if name.casefold() in REASONING_NAMES]:
            problem = f" writes the column {taken[0]!r}, which the input has already: rename that"
            raise SpecError(option, problem, field="sampling.reasoning")

    @contextmanager
    def plan(self, source: InputSource, renderer: PromptRenderer | None = None, num_workers: int = 1) -> Iterator[Plan]:
        """The plan, for as long as its shards are read. `renderer`: of `check`, where that was called before.

        `num_workers`: how many are to share the job.

        Raises `SpecError` when no row of the input can be rendered, `InputError` when it cannot be read on,
        `StorageError` when there is no room to sort in.
        """
        renderer = renderer or self.check(source)
        unifier = source.unifier()
        num_rows = num_errors = answer_tokens = 0
        with (
            leave_alone_what_is_there(),
            self._side_by_side(renderer, source.columns) as side_by_side,
            self._sorter() as sorter,
        ):
            with self._sorter() as id_sorter:
                ids = CustomIds(id_sorter)
                run_rows = _RUN_ROWS if self.spec.image is None else _RUN_ROWS_WITH_IMAGES
                for run in side_by_side.plan(_observed(source, unifier, run_rows)):
                    sorter.extend(run.items)
                    ids.add(run)
                    num_rows += len(run.items)
                    num_errors += len(run.errors)
                    answer_tokens += run.answer_tokens
                repeats = ids.repeats()
            num_errors += len(repeats.duplicates)
            cutter = ShardCutter(self.shard_rows or shard_rows_of(num_rows, num_workers))
            most = answer_tokens if self.spec.samples_each_row else None
            yield Plan(unifier.schema(), num_rows, num_errors, most, sorter, repeats, cutter, side_by_side)

    def _sorter(self) -> ExternalSorter:
        return ExternalSorter(self.sort_folder, self.sort_memory_bytes)

    def _side_by_side(self, renderer: PromptRenderer, columns: Sequence[str]) -> SideBySide:
        context = self.model.max_position_embeddings
        recipe = Recipe(self.spec.model_dump_json(), tuple(columns), self.tokenizer.folder, context)
        return SideBySide(RowsPlanner(renderer, self.tokenizer, context), recipe)


def make_planner(spec: JobSpec, shard_rows: int | None, sort_folder: Path) -> Planner:
    """A planner for the job's model. Raises `ModelError`, and `ConfigError` where no worker could be started for it.

    Its `spec` names the commit that a branch is at now: every attempt at the job has the same weights. And it has the
    time that a chat template may ask for: rows that are asked again have the same prompts.
    """
    spec.precision.check()
    if spec.lora is not None:
        spec.lora.check()
    located = locate_model(spec.model, with_weights=False)
    model, tokenizer = ModelConfig.from_pretrained(located.folder), Tokenizer.from_pretrained(located.folder)
    told_time = spec.told_time or (datetime.now() if tokenizer.tells_time else None)
    return Planner(
        spec.model_copy(update={"model": located.name, "told_time": told_time}),
        model,
        tokenizer,
        shard_rows,
        sort_folder,
    )


def _columns(source: InputSource) -> list[str]:
    """The input's columns; where every row may have its own, those of the first rows."""
    if not source.has_fixed_columns:
        deque(islice(source, _RUN_ROWS), maxlen=0)
    return source.columns


@contextmanager
def _told_from_another_format(source: InputSource) -> Iterator[None]:
    """Raises `InputError` where a column lacks because no row can be read, as of another format than the name says."""
    try:
        yield
    except SpecError:
        first = next(iter(source), None)
        if not source.columns and first is not None and first.error is not None:
            is_other = NOT_JSON in first.error or NO_OBJECT in first.error
            hint = ": write a JSON object a line, or an array of them into a .json" if is_other else ""
            raise InputError(f"input {source.name} has no row that can be read, {first.error}{hint}") from None
        raise


def _observed(rows: Iterable[InputRow], unifier: SchemaUnifier, run_rows: int = _RUN_ROWS) -> Iterator[list[InputRow]]:
    """The rows in runs; `unifier` has seen their values."""
    run: list[InputRow] = []
    num_characters = 0
    for row in rows:
        num_characters += unifier.observe(row.values)
        run.append(row)
        if len(run) == run_rows or num_characters >= _RUN_CHARACTERS:
            yield run
            run, num_characters = [], 0
    if run:
        yield run
