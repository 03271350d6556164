"""A shard's rows while they are asked: those that wait for the engine, and those that are done, as output rows."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...engine.errors import InvalidRequestError
from ...engine.logprobs import TokenLogprobs
from ...engine.request import Request
from ...engine.sampling_params import SamplingParams
from ...storage.rows.spool import input_fields, prompt_images, prompt_token_arrays, row_samplings, without_images
from ..hosting.outcomes import Answer, EngineFailure, Outcome, Refusal
from .parsed import parsed_type, parsed_value
from .part_schema import part_schema
from .receipts import receipt, receipts
from .row_answers import Answered, answer_columns, error_columns
from .row_calls import ForcedCalls, RowCalls, RowTools
from .row_requests import RowRequests
from .shown_images import ShownImages
from .voting import drawn_columns, num_wanted, opinion_of, voted_columns


class _Finished(NamedTuple):
    """A row that is done: where it stands in the shard's table, and its output columns.

    `params`: what it was answered with here; a receipt is still to be made of them.
    """

    place: int
    columns: dict[str, Any]
    params: SamplingParams | None = None


@dataclass(slots=True)
class _OpenRow:
    """A row that waits for what becomes of its requests, one for each of its `n` answers.

    `num_asked`: how many of them the engine has been given, in their order. It may never need the others.
    """

    place: int
    requests: list[Request]
    num_asked: int
    outcomes: dict[str, Answer | Refusal] = field(default_factory=dict)

    def ask(self, count: int) -> list[Request]:
        """The next ones that the engine is to be given."""
        asked = self.requests[self.num_asked : self.num_asked + count]
        self.num_asked += len(asked)
        return asked

    def with_outcome(self, request: Request, outcome: Answer | Refusal) -> list[Answered] | Refusal | None:
        """The answers that were asked for, in their order, or what was refused of them; None while any is missing."""
        if len(self.requests) == 1:
            return outcome if isinstance(outcome, Refusal) else [(request, outcome)]
        self.outcomes[request.request_id] = outcome
        if len(self.outcomes) < self.num_asked:
            return None
        samples = []
        for request in self.requests[: self.num_asked]:
            outcome = self.outcomes[request.request_id]
            if isinstance(outcome, Refusal):
                return outcome
            samples.append((request, outcome))
        return samples


class RowBatch:
    """Used by one thread. `table` is the spooled shard; rows in `done` are left out.

    `row_requests`: of the attempt. `receipt`: what those of its answers have in common.
    """

    def __init__(
        self,
        table: pa.Table,
        done: Collection[int],
        row_requests: RowRequests,
        receipt: Mapping[str, Any],
    ) -> None:
        spec, tokenizer = row_requests.spec, row_requests.tokenizer
        self._table = without_images(table)
        self._row_requests = row_requests
        self._spec = spec
        self._tokenizer = tokenizer
        self._receipt = receipt
        self._schema = part_schema(spec, input_fields(table.schema))
        self._parsed_type = parsed_type(spec)
        tools = RowTools(table, spec)
        self._calls = RowCalls(table, tools, spec, tokenizer) if "tool_calls" in self._schema.names else None
        self._forced_calls = ForcedCalls(tools, spec)
        self._shown = ShownImages(self._table, spec)
        self._open: dict[str, tuple[_OpenRow, Request]] = {}
        self._failed: dict[str, EngineFailure] = {}
        self._finished: list[_Finished] = []
        columns = (table["row"].to_pylist(), prompt_token_arrays(table), table["plan_error"].to_pylist())
        zipped = zip(*columns, row_samplings(table), prompt_images(table), strict=False)
        for place, (row, token_ids, error, sampling, images) in enumerate(zipped):
            if row in done:
                continue
            if error is not None:
                self._finished.append(_Finished(place, error_columns(error, 0)))
            else:
                self._begin(place, row, token_ids, sampling, images)

    def _begin(
        self, place: int, row: int, token_ids: Sequence[int], sampling: str | None, beside: Sequence[bytes | None]
    ) -> None:
        try:
            images = self._shown.of(place, beside) if beside else ()
            requests = self._row_requests.of(row, token_ids, sampling, images, self._forced_calls.form(place))
        except InvalidRequestError as error:
            self._finished.append(_Finished(place, error_columns(str(error), len(token_ids))))
            return
        asked = requests[: num_wanted((), len(requests))] if self._spec.vote else requests
        self._wait_for(_OpenRow(place, requests, len(asked)), asked)

    def _wait_for(self, row: _OpenRow, requests: Sequence[Request]) -> None:
        for request in requests:
            self._open[request.request_id] = row, request

    @property
    def requests(self) -> list[Request]:
        """What is still to be answered."""
        return [request for _, request in self._open.values()]

    @property
    def all_requests(self) -> list[Request]:
        """The same, with those that may yet be asked."""
        return [request for requests in self.open_rows().values() for request in requests]

    @property
    def resume_logprobs(self) -> Mapping[str, Sequence[TokenLogprobs]]:
        """By the ids of requests that are resumed: what is known of the tokens that they are resumed from."""
        return self._row_requests.resume_logprobs

    def open_rows(self) -> dict[int, list[Request]]:
        """The requests of rows that wait for an answer, by where these stand in the table."""
        return {row.place: row.requests for row, _ in self._open.values()}

    def request(self, row: int) -> Request | None:
        """That of a row's first answer, while it is waited for. May be called from another thread.

        Which of several answers is the row's own is not known before there has been a vote.
        """
        if self._spec.vote:
            return None
        waiting = self._open.get(self._row_requests.name(row))
        return None if waiting is None else waiting[1]

    def answer(self, answers: Mapping[int, dict[str, Any]]) -> None:
        """Give waiting rows their columns, by where they stand, whatever becomes of their requests."""
        open_rows = self.open_rows()
        for place, columns in answers.items():
            for request in open_rows[place]:
                self._open.pop(request.request_id, None)
            self._finished.append(_Finished(place, columns))

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

    def record(self, outcomes: Iterable[Outcome]) -> list[Request]:
        """Note what the engine has made of rows; returns what it is to be given as well.

        That is a row's next requests where its answers do not decide a vote yet, and a request anew where the engine
        has refused the tokens that its answer was to be resumed from. Rows that were given up are left alone.
        """
        wanted: list[Request] = []
        for outcome in outcomes:
            if (waiting := self._open.get(outcome.request_id)) is None:
                continue
            if isinstance(outcome, EngineFailure):
                self._failed[outcome.request_id] = outcome
            elif isinstance(outcome, Refusal) and not outcome.has_run and waiting[1].resume_token_ids:
                wanted.append(self._anew(*waiting))
            else:
                wanted += self._settle(outcome)
        return wanted

    def refuse_failed(self, prefix: str) -> None:
        """Turn the rows that the engine dropped into error rows; their errors begin with `prefix`."""
        for request_id, failed in self._failed.items():
            self._settle(Refusal(request_id, prefix + failed.error))
        self._failed.clear()

    def give_up(self, error: str) -> None:
        """Turn all rows that wait for an answer into error rows."""
        for place, requests in self.open_rows().items():
            self._finished.append(_Finished(place, error_columns(error, len(requests[0].prompt_token_ids))))
        self._open.clear()
        self._failed.clear()

    def _anew(self, row: _OpenRow, request: Request) -> Request:
        fresh = self._row_requests.anew(request)
        row.requests[row.requests.index(request)] = fresh
        self._open[request.request_id] = row, fresh
        return fresh

    def _settle(self, outcome: Answer | Refusal) -> list[Request]:
        """Finish the outcome's row, if that is all it takes; returns what else is to be asked."""
        row, request = self._open.pop(outcome.request_id)
        samples = row.with_outcome(request, outcome)
        if samples is None:
            return []
        if isinstance(samples, Refusal):
            columns = error_columns(samples.error, len(request.prompt_token_ids))
            self._finished.append(_Finished(row.place, columns))
            return []
        if (count := self._num_wanted(row, samples)) > 0:
            self._wait_for(row, asked := row.ask(count))
            return asked
        self._finished.append(_Finished(row.place, self._columns(samples), samples[0][0].params))
        return []

    def _num_wanted(self, row: _OpenRow, samples: Sequence[Answered]) -> int:
        """How many more answers a vote needs."""
        if row.num_asked == len(row.requests):
            return 0
        opinions = [opinion_of(self._tokenizer, *sample) for sample in samples]
        return num_wanted(opinions, len(row.requests))

    def _columns(self, samples: Sequence[Answered]) -> dict[str, Any]:
        if not self._spec.vote:
            return answer_columns(self._tokenizer, samples, self._spec.samples_each_row)
        request, answer = samples[0]
        if self._spec.draws_votes:
            return drawn_columns(self._tokenizer, request, answer, self._spec.sampling.n)
        return voted_columns(self._tokenizer, samples)

    def finished_rows(self) -> dict[int, dict[str, Any]]:
        """The columns of what `take_finished` is to give, by where the rows stand in the table."""
        return {row.place: self._with_receipt(row) for row in self._finished}

    def _with_receipt(self, row: _Finished) -> dict[str, Any]:
        if row.params is None:
            return row.columns
        return row.columns | {"receipt": receipt(self._receipt, row.params)}

    def take_finished(self) -> pa.Table:
        """The rows answered since the last call, with the output's columns."""
        finished, self._finished = self._finished, []
        # Taken from the spooled table, not rebuilt from Python values: types come out as they went in.
        carried = self._table.take(pa.array([row.place for row in finished]))
        names = [name for name in self._schema.names if name in carried.column_names]
        fields = [field for field in self._schema if field.name not in names]
        answers = pa.Table.from_pylist([self._read(row) for row in finished], schema=pa.schema(fields))
        answers = self._with_receipts(answers, finished)
        if self._spec.cache:
            column = answers.schema.get_field_index("from_cache")
            answers = answers.set_column(column, "from_cache", pc.fill_null(answers["from_cache"], False))
        columns = [carried[name] if name in names else answers[name] for name in self._schema.names]
        return pa.table(columns, schema=self._schema)

    def _read(self, row: _Finished) -> Mapping[str, Any]:
        """A row's columns with its answer as a value, where it is JSON, or the calls of tools in it."""
        text = row.columns.get("output")
        if self._calls is not None:
            return row.columns | {"tool_calls": self._calls.of(row.place, text)}
        if self._parsed_type is not None:
            return row.columns | {"parsed": parsed_value(text, self._parsed_type)}
        return row.columns

    def _with_receipts(self, answers: pa.Table, finished: Sequence[_Finished]) -> pa.Table:
        """`answers` with the receipts of those that were given here; others bring theirs along."""
        column = answers.schema.get_field_index("receipt")
        if column < 0:
            return answers
        own = receipts(self._receipt, [row.params for row in finished], answers.schema.field(column).type)
        brought = answers["receipt"]
        return answers.set_column(
            column, "receipt", own if brought.null_count == len(brought) else pc.coalesce(brought, own)
        )
