"""Small jobs of long rows beside the disturbed one: their tokens are checkpointed, and streamed to who watches them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from headrace.engine.config import EngineConfig
from headrace.engine.logprobs import TokenLogprobs
from headrace.engine.request import Request
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.client.client import Job
from headrace.jobs.hosting.answer_values import logprob_entries
from headrace.jobs.spec.sampling import row_seed

from ..engine.fakes import FakeRunner, fake_engine
from .model import CONTEXT, prompt_of

# Where a site's long jobs' rows begin: the disturbed job's are below.
FIRST_ROW = 6000
_BLOCK_SIZE = 4
_TOP_LOGPROBS = 2


def array_schema(num_items: int) -> dict[str, Any]:
    """An array of digits of one length, in some ten per cent."""
    return {"type": "array", "items": {"enum": list(range(6))}, "minItems": num_items * 9 // 10, "maxItems": num_items}


def kinds(max_tokens: int) -> dict[str, dict[str, Any]]:
    """What is asked of rows of so many tokens, by what is special about it."""
    whole = {"max_tokens": max_tokens, "ignore_eos": True}
    drawn = {"temperature": 0.8, "seed": 5}
    return {
        "guided": {
            "max_tokens": max_tokens,
            **drawn,
            "structured_outputs": {"json": array_schema(max_tokens // 2 - 1)},
        },
        "drawn": {**whole, **drawn},
        "logprobs": {**whole, "logprobs": True, "top_logprobs": _TOP_LOGPROBS},
        "penalties": {**whole, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    }


@dataclass(frozen=True)
class LongJob:
    """A submitted job whose row r is the site's row `first_row` + r."""

    kind: str
    job: Job
    first_row: int
    num_rows: int
    tokenizer: Tokenizer

    @property
    def has_ended(self) -> bool:
        return self.job.progress().state.has_ended

    @cached_property
    def expected(self) -> list[dict[str, Any]]:
        """The columns of each row as an engine of its own answers them, undisturbed."""
        return [self._columns(answer) for answer in _answers([self._request(row) for row in range(self.num_rows)])]

    def _request(self, row: int) -> Request:
        sampling = self.job.spec.sampling
        params = sampling.params(None).with_seed(row_seed(sampling.seed, row))
        grammar = self.tokenizer.grammar(params.structured_outputs)
        return Request(str(row), prompt_of(self.first_row + row), params, grammar=grammar)

    def _columns(self, answer: "_Answer") -> dict[str, Any]:
        columns: dict[str, Any] = {"output": self.tokenizer.decode(answer.token_ids)}
        if answer.logprobs:
            columns["logprobs"] = logprob_entries(self.tokenizer, answer.token_ids, answer.logprobs, _TOP_LOGPROBS)
        return columns

    def assert_undisturbed(self, table: pa.Table) -> None:
        """Each row once, and as if nothing had happened."""
        assert table["row"].to_pylist() == list(range(self.num_rows)), self.kind
        assert set(table["error"].to_pylist()) == {None}, self.kind
        assert table.select(list(self.expected[0])).to_pylist() == self.expected, self.kind


@dataclass
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def _answers(requests: Sequence[Request]) -> list[_Answer]:
    config = EngineConfig(block_size=_BLOCK_SIZE, max_num_seqs=16, enable_prefix_caching=False)
    engine = fake_engine(FakeRunner(16 * CONTEXT // _BLOCK_SIZE, _BLOCK_SIZE), config, CONTEXT)
    answers = {request.request_id: _Answer() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            answers[event.request_id].token_ids += event.new_token_ids
            answers[event.request_id].logprobs += event.logprobs
    return list(answers.values())
