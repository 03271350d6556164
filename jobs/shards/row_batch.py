"""A shard's open rows: as requests for the engine, and as output rows once they are answered."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...engine.errors import InvalidRequestError
from ...engine.logprobs import TokenLogprobs
from ...engine.request import Request, SamplingParams
from ...engine.structured.grammar import Grammar
from ...engine.text.detokenizer import StopStrings
from ...engine.text.tokenizer import Tokenizer
from ...storage.spool import input_fields, prompt_token_arrays
from ..engine_host import Answer, EngineFailure, Outcome, Refusal
from ..schemas import JobSpec, row_seed
from .begun import Begun
from .part_schema import part_schema
from .receipts import receipt, receipts
from .row_answers import Answered, answer_columns, error_columns, text_of
from .row_sampling import RowSampling
from .voting import drawn_columns, num_wanted, opinion, voted_columns

TokenLists = tuple[tuple[int, ...], ...]
NOTHING_KNOWN: Mapping[str, Begun] = MappingProxyType({})


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

    index: int
    requests: list[Request]
    num_asked: int = 0
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

    `known`: what answers begin with, by `ROW` or `ROW/SAMPLE`; their requests are resumed from it. `resume_logprobs`:
    of these, by the requests' ids, what is known of their tokens. `receipt`: what those of its rows have in common.
    """

    def __init__(
        self,
        table: pa.Table,
        done: Collection[int],
        spec: JobSpec,
        tokenizer: Tokenizer,
        prefix: str,
        known: Mapping[str, Begun] = NOTHING_KNOWN,
        receipt: Mapping[str, Any] | None = None,
    ) -> None:
        self._table = table
        self._prefix = prefix
        self._known = known
        self.resume_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self._spec = spec
        self._lora = None if spec.lora is None else spec.lora.request()
        self._receipt = receipt
        self._tokenizer = tokenizer
        self._schema = part_schema(spec, input_fields(table.schema))
        self._choice_token_ids = tokenizer.encode_choices(spec.choices) if spec.choices else None
        self._open: dict[str, tuple[_OpenRow, Request]] = {}
        self._wanted: list[Request] = []
        self._failed: dict[str, EngineFailure] = {}
        self._finished: list[_Finished] = []
        columns = (table["row"].to_pylist(), prompt_token_arrays(table), table["plan_error"].to_pylist())
        own = table["row_sampling"].to_pylist() if spec.samples_each_row else repeat(None)
        for index, (row, token_ids, error, sampling) in enumerate(zip(*columns, own, strict=False)):
            if row in done:
                continue
            if error is not None:
                self._finished.append(_Finished(index, error_columns(error, 0)))
            else:
                self._ask(f"{prefix}/{row}", index, row, token_ids, sampling)

    def _ask(self, request_id: str, index: int, row: int, token_ids: Sequence[int], sampling: str | None) -> None:
        try:
            params, choice_token_ids = self._params(row, sampling)
            if sampling is None and self._plain is not None:
                requests = [self._plain.of_row(request_id, token_ids, params)]
            else:
                grammar = self._tokenizer.grammar(params.structured_outputs)
                requests = self._requests(request_id, token_ids, params, choice_token_ids, grammar)
        except InvalidRequestError as error:
            self._finished.append(_Finished(index, error_columns(str(error), len(token_ids))))
            return
        if self._known:
            requests = [self._resumed(each) for each in requests]
        count = len(requests)
        if count == 1:
            # Mostly. Without a look at what it may yet take.
            self._open[request_id] = (_OpenRow(index, requests, 1), requests[0])
        else:
            self._want(_OpenRow(index, requests), num_wanted((), count) if self._spec.vote else count)

    def _want(self, row: _OpenRow, count: int) -> list[Request]:
        """Wait for some more of a row's requests, which the engine is yet to be given."""
        requests = row.ask(count)
        self._open.update((request.request_id, (row, request)) for request in requests)
        return requests

    def _requests(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        choice_token_ids: TokenLists | None,
        grammar: Grammar | None,
    ) -> list[Request]:
        """One for each sample: the first computes the prompt, the others fork from it."""
        checker = StopStrings.of(self._tokenizer, params)
        first = Request(
            request_id, token_ids, params.of_sample(0), choice_token_ids, checker, grammar, lora_request=self._lora
        )
        # Samples of choices are all drawn from what one request brings.
        if params.n == 1 or (self._spec.vote and choice_token_ids is not None):
            return [first]
        others = [
            Request(
                f"{request_id}/{sample}",
                token_ids,
                params.of_sample(sample),
                choice_token_ids,
                StopStrings.of(self._tokenizer, params),
                grammar,
                fork_of=request_id,
                lora_request=self._lora,
            )
            for sample in range(1, params.n)
        ]
        return [first, *others]

    def _resumed(self, request: Request) -> Request:
        known = self._known.get(request.request_id.removeprefix(f"{self._prefix}/"))
        # The engine says nothing of tokens that it is given, nor of a prompt whose answer is complete with them.
        with_logprobs, wants_prompt = request.params.logprobs is not None, request.params.prompt_logprobs is not None
        if not known or request.params.choices is not None or wants_prompt:
            return request
        if with_logprobs and len(known.logprobs) < len(known):
            return request
        if with_logprobs:
            self.resume_logprobs[request.request_id] = known.logprobs
        return replace(request, resume_token_ids=known.token_ids)

    def _params(self, row: int, sampling: str | None) -> tuple[SamplingParams, TokenLists | None]:
        """A row's parameters, and its choices as tokens. Raises `InvalidRequestError`."""
        if sampling is None:
            params = self._job_params
            # A greedy answer has no use for a seed.
            if not params.is_greedy:
                params = params.with_seed(row_seed(self._spec.sampling.seed, row))
            return params, self._choice_token_ids
        own = RowSampling.model_validate_json(sampling)
        return own.params(), self._tokenizer.encode_choices(own.choices) if own.choices else None

    @cached_property
    def _plain(self) -> Request | None:
        """What is the same in the requests of all rows, where each row has one and nothing that counts its tokens.

        Raises `InvalidRequestError`.
        """
        params = self._job_params
        if params.n > 1 or params.stop_strings:
            return None
        grammar = self._tokenizer.grammar(params.structured_outputs)
        return Request("", (), params, self._choice_token_ids, grammar=grammar, lora_request=self._lora)

    @cached_property
    def _job_params(self) -> SamplingParams:
        """What all rows have in common. Raises `InvalidRequestError`."""
        params = self._spec.sampling.params(0, self._spec.choices)
        # Of as many votes for two answers the likelier one wins.
        needs_logprobs = self._spec.vote and params.choices is None and params.logprobs is None
        return replace(params, logprobs=0) if needs_logprobs else params

    @property
    def requests(self) -> list[Request]:
        """What is still to be answered."""
        return [request for _, request in self._open.values()]

    @property
    def all_requests(self) -> list[Request]:
        """The same, with those that may yet be asked."""
        return [request for requests in self.open_rows().values() for request in requests]

    def open_rows(self) -> dict[int, list[Request]]:
        """The requests of rows that wait for an answer, by where these stand in the table."""
        return {row.index: row.requests for row, _ in self._open.values()}

    def answer(self, index: int, columns: dict[str, Any]) -> None:
        """Give the waiting row at `index` these columns, whatever becomes of its requests."""
        for request in self.open_rows()[index]:
            self._open.pop(request.request_id, None)
        self._finished.append(_Finished(index, columns))

    def finished_rows(self) -> dict[int, dict[str, Any]]:
        """The columns of what `take_finished` is to give, by where the rows stand in the table."""
        return {row.place: self._with_receipt(row) for row in self._finished}

    def _with_receipt(self, row: _Finished) -> dict[str, Any]:
        if row.params is None or self._receipt is None:
            return row.columns
        return row.columns | {"receipt": receipt(self._receipt, row.params)}

    def request(self, row: int) -> Request | None:
        """That of a row's first answer, while it is waited for. May be called from another thread.

        Which of several answers is the row's own is not known before there has been a vote.
        """
        if self._spec.vote:
            return None
        waiting = self._open.get(f"{self._prefix}/{row}")
        return None if waiting is None else waiting[1]

    def anew(self, outcome: Outcome) -> Request | None:
        """What to ask instead when the engine has refused tokens that an answer was to be resumed from."""
        row, request = self._open[outcome.request_id]
        if not isinstance(outcome, Refusal) or outcome.has_run or not request.resume_token_ids:
            return None
        fresh = replace(request, resume_token_ids=(), stop_checker=StopStrings.of(self._tokenizer, request.params))
        self.resume_logprobs.pop(outcome.request_id, None)
        row.requests[row.requests.index(request)] = fresh
        self._open[outcome.request_id] = (row, fresh)
        return fresh

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
        self._settle(outcome)

    def refuse_failed(self, prefix: str) -> None:
        """Turn the rows that the engine dropped into error rows; their errors begin with `prefix`."""
        for request_id, failed in self._failed.items():
            self._settle(Refusal(request_id, prefix + failed.error))
        self._failed.clear()

    def _settle(self, outcome: Answer | Refusal) -> None:
        row, request = self._open.pop(outcome.request_id)
        samples = row.with_outcome(request, outcome)
        if samples is None:
            return
        if isinstance(samples, Refusal):
            num_prompt_tokens = len(row.requests[0].prompt_token_ids)
            self._finished.append(_Finished(row.index, error_columns(samples.error, num_prompt_tokens)))
        elif (count := self._num_wanted(row, samples)) > 0:
            self._wanted += self._want(row, count)
        else:
            self._finished.append(_Finished(row.index, self._columns(samples), samples[0][0].params))

    def _num_wanted(self, row: _OpenRow, samples: list[Answered]) -> int:
        """How many more answers a vote needs."""
        if row.num_asked == len(row.requests):
            return 0
        opinions = [opinion(text_of(self._tokenizer, *sample)) for sample in samples]
        return num_wanted(opinions, len(row.requests))

    def take_wanted(self) -> list[Request]:
        """What the engine is to be given as well, now that other answers are known."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def _columns(self, samples: list[Answered]) -> dict[str, Any]:
        request, answer = samples[0]
        if not self._spec.vote:
            return answer_columns(self._tokenizer, samples, self._spec.samples_each_row)
        if request.params.choices is not None:
            return drawn_columns(self._tokenizer, request, answer, self._spec.sampling.n)
        return voted_columns(self._tokenizer, samples)

    def waits_for(self, outcome: Outcome) -> bool:
        """Whether the row has not been given up meanwhile."""
        return outcome.request_id in self._open

    def give_up(self, error: str) -> None:
        """Turn all rows that wait for an answer into error rows."""
        for index, requests in self.open_rows().items():
            self._finished.append(_Finished(index, error_columns(error, len(requests[0].prompt_token_ids))))
        self._open.clear()
        self._failed.clear()

    def take_finished(self) -> pa.Table:
        """The rows answered since the last call, with the output's columns."""
        finished, self._finished = self._finished, []
        # Taken from the spooled table, not rebuilt from Python values: types come out as they went in.
        carried = self._table.take(pa.array([row.place for row in finished]))
        names = [name for name in self._schema.names if name in carried.column_names]
        fields = [field for field in self._schema if field.name not in names]
        answers = pa.Table.from_pylist([row.columns for row in finished], schema=pa.schema(fields))
        answers = self._with_receipts(answers, finished)
        if self._spec.cache:
            column = answers.schema.get_field_index("from_cache")
            answers = answers.set_column(column, "from_cache", pc.fill_null(answers["from_cache"], False))
        columns = [carried[name] if name in names else answers[name] for name in self._schema.names]
        return pa.table(columns, schema=self._schema)

    def _with_receipts(self, answers: pa.Table, finished: Sequence[_Finished]) -> pa.Table:
        """`answers` with the receipts of those that were given here; others bring theirs along."""
        column = answers.schema.get_field_index("receipt")
        if self._receipt is None or column < 0:
            return answers
        own = receipts(self._receipt, [row.params for row in finished], answers.schema.field(column).type)
        brought = answers["receipt"]
        return answers.set_column(
            column, "receipt", own if brought.null_count == len(brought) else pc.coalesce(brought, own)
        )
