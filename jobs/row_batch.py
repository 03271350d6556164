"""A shard's open rows: as requests for the engine, and as output rows once they are answered."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..engine.detokenizer import StopStrings, answer_text
from ..engine.errors import InvalidRequestError
from ..engine.request import Request
from ..engine.tokenizer import Tokenizer
from ..storage.parts import output_schema
from ..storage.spool import input_fields
from .engine_host import Answer, EngineFailure, Outcome, Refusal
from .schemas import JobSpec


@dataclass(frozen=True)
class _Finished:
    """An answered row: where it stands in the shard's table, and its output columns."""

    index: int
    columns: dict[str, Any]


class RowBatch:
    """Used by one thread. `table` is the spooled shard; rows in `done` are left out."""

    def __init__(
        self, table: pa.Table, done: Collection[int], spec: JobSpec, tokenizer: Tokenizer, prefix: str
    ) -> None:
        self._table = table
        self._spec = spec
        self._tokenizer = tokenizer
        self._schema = output_schema(input_fields(table.schema), spec.choices is not None)
        self._choice_token_ids = tokenizer.encode_choices(spec.choices) if spec.choices else None
        self._open: dict[str, tuple[int, Request]] = {}
        self._failed: dict[str, EngineFailure] = {}
        self._finished: list[_Finished] = []
        columns = (table[name].to_pylist() for name in ("row", "prompt_token_ids", "plan_error"))
        for index, (row, token_ids, error) in enumerate(zip(*columns, strict=True)):
            if row in done:
                continue
            if error is not None:
                self._finished.append(_Finished(index, _error_columns(error, 0)))
            else:
                self._ask(f"{prefix}/{row}", index, row, token_ids)

    def _ask(self, request_id: str, index: int, row: int, token_ids: list[int]) -> None:
        try:
            params = self._spec.sampling.params(row, self._spec.choices)
        except InvalidRequestError as error:
            self._finished.append(_Finished(index, _error_columns(str(error), len(token_ids))))
        else:
            stop_checker = StopStrings.of(self._tokenizer, params)
            request = Request(request_id, token_ids, params, self._choice_token_ids, stop_checker)
            self._open[request_id] = index, request

    @property
    def requests(self) -> list[Request]:
        """The rows that still want an answer."""
        return [request for _, request in self._open.values()]

    @property
    def is_answered(self) -> bool:
        """Whether nothing more is to come from the engine."""
        return len(self._failed) == len(self._open)

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    @property
    def is_complete(self) -> bool:
        """Whether every row was answered and taken."""
        return not self._open and not self._finished

    @property
    def failure(self) -> str | None:
        """Why the engine dropped rows, if it did."""
        return next((failed.error for failed in self._failed.values()), None)

    def record(self, outcome: Outcome) -> None:
        """Note what the engine has made of a row."""
        if isinstance(outcome, EngineFailure):
            self._failed[outcome.request_id] = outcome
            return
        index, request = self._open.pop(outcome.request_id)
        if isinstance(outcome, Refusal):
            columns = _error_columns(outcome.error, len(request.prompt_token_ids))
        else:
            columns = self._answer_columns(request, outcome)
        self._finished.append(_Finished(index, columns))

    def refuse_failed(self, prefix: str) -> None:
        """Turn the rows that the engine dropped into error rows; their errors begin with `prefix`."""
        for request_id, failed in self._failed.items():
            index, request = self._open.pop(request_id)
            columns = _error_columns(prefix + failed.error, len(request.prompt_token_ids))
            self._finished.append(_Finished(index, columns))
        self._failed.clear()

    def take_finished(self) -> pa.Table:
        """The rows answered since the last call, with the output's columns."""
        finished, self._finished = self._finished, []
        # Taken from the spooled table, not rebuilt from Python values: types come out as they went in.
        carried = self._table.take(pa.array([row.index for row in finished]))
        names = [name for name in self._schema.names if name in carried.column_names]
        answers = pa.Table.from_pylist(
            [row.columns for row in finished],
            schema=pa.schema([field for field in self._schema if field.name not in names]),
        )
        columns = [carried[name] if name in names else answers[name] for name in self._schema.names]
        return pa.table(columns, schema=self._schema)

    def _answer_columns(self, request: Request, answer: Answer) -> dict[str, Any]:
        choices, probabilities, index = self._spec.choices, answer.choice_probabilities, answer.choice_index
        label = None
        if choices is not None and probabilities is not None and index is not None:
            label = {
                "label": choices[index],
                "confidence": probabilities[index],
                "probabilities": list(zip(choices, probabilities, strict=True)),
            }
        text = label["label"] if label else self._text(request, answer)
        return {
            "output": text,
            **(label or {}),
            "finish_reason": str(answer.finish_reason),
            "prompt_tokens": len(request.prompt_token_ids),
            "cached_tokens": answer.num_cached_tokens,
            "completion_tokens": len(answer.token_ids),
        }

    def _text(self, request: Request, answer: Answer) -> str:
        return answer_text(self._tokenizer, request, answer.token_ids, answer.finish_reason)


def _error_columns(error: str, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "error": error,
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": 0,
    }


def sum_column(table: pa.Table, name: str) -> int:
    """Sum of an integer column; 0 for an empty one."""
    return int(pc.sum(table[name]).as_py() or 0)
