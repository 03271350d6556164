"""A row with several answers: whatever becomes of each of them, the row is told of once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.engine.request import FinishReason, Request
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.hosting.outcomes import Answer, EngineFailure, Refusal
from headrace.jobs.shards.begun import Begun
from headrace.jobs.shards.part_schema import part_schema
from headrace.jobs.shards.row_batch import RowBatch
from headrace.jobs.shards.row_requests import NOTHING_KNOWN, RowRequests
from headrace.jobs.shards.row_sampling import RowSampling
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.spec.schemas import JobSpec

from ..attempts import RECEIPT
from ..models import write_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def table() -> pa.Table:
    return pa.table(
        {
            "row": [0, 1],
            "custom_id": ["0", "1"],
            "prompt_token_ids": [[1, 2], [3]],
            "plan_error": pa.array([None, None], pa.string()),
        }
    )


def asking(spec: JobSpec, known: Mapping[str, Begun] = NOTHING_KNOWN) -> RowRequests:
    return RowRequests(spec, Tokenizer.from_pretrained(Path(spec.model)), "7", known)


@pytest.fixture
def batch(model, table) -> RowBatch:
    spec = JobSpec.parse(model=str(model), sampling={"n": 3, "temperature": 1.0})
    return RowBatch(table, (), asking(spec), RECEIPT)


def answer(request: Request, token: int) -> Answer:
    return Answer(request.request_id, (token,), FinishReason.LENGTH, 0, None, None)


def test_a_row_whose_prompt_is_scored_begins_anew(model, table):
    """The engine may have nothing to compute of an answer that it is given, and would say nothing of the prompt."""
    known = {"0": Begun((4,)), "1": Begun((5,))}
    for scored in (False, True):
        spec = JobSpec.parse(model=str(model), sampling={"max_tokens": 2, "prompt_logprobs": 1 if scored else None})
        batch = RowBatch(table, (), asking(spec, known), RECEIPT)
        assert [request.resume_token_ids for request in batch.requests] == ([(), ()] if scored else [(4,), (5,)])


def test_each_answer_has_a_request_with_an_id_and_a_seed_of_its_own(batch):
    assert [request.request_id for request in batch.requests] == ["7/0", "7/0/1", "7/0/2", "7/1", "7/1/1", "7/1/2"]
    assert len({request.params.seed for request in batch.requests}) == 6
    assert {request.params.n for request in batch.requests} == {1}


def test_a_row_is_finished_with_its_last_answer_in_whatever_order_they_come(batch):
    requests = batch.requests[:3]
    for request, token in zip(requests[:0:-1], (5, 6), strict=True):
        batch.record([answer(request, token)])
        assert not batch.has_finished
    batch.record([answer(requests[0], 4)])
    (row,) = batch.take_finished().to_pylist()
    assert (row["output"], row["outputs"], row["completion_tokens"]) == ("d", ["d", "f", "e"], 3)
    assert not batch.is_answered
    assert len(batch.requests) == 3


def test_one_refusal_refuses_the_row_once(batch):
    first, second, third = batch.requests[3:]
    batch.record([Refusal(first.request_id, "too long")])
    batch.record([answer(second, 4)])
    batch.record([Refusal(third.request_id, "too long as well")])
    (row,) = batch.take_finished().to_pylist()
    assert (row["row"], row["error"], row["outputs"], row["completion_tokens"]) == (1, "too long", None, 0)


def test_an_answer_the_engine_dropped_leaves_its_row_open_until_it_is_refused(batch):
    first, second, third, *others = batch.requests
    for request in (second, third, *others):
        batch.record([answer(request, 4)])
    batch.record([EngineFailure(first.request_id, "out of memory")])
    assert batch.is_answered
    assert batch.failure == "out of memory"
    assert batch.take_finished()["row"].to_pylist() == [1]
    assert not batch.is_complete
    batch.refuse_failed("engine failed: ")
    assert batch.take_finished()["error"].to_pylist() == ["engine failed: out of memory"]
    assert batch.is_complete


def test_rows_that_were_given_up_stay_so_whatever_the_engine_says_of_them(batch):
    requests = batch.requests
    batch.record([answer(request, 4) for request in requests[:3]])
    batch.give_up("expired")
    late = [answer(requests[3], 4), Refusal(requests[4].request_id, "no"), EngineFailure(requests[5].request_id, "no")]
    assert batch.record(late) == []
    assert batch.take_finished()["error"].to_pylist() == [None, "expired"]
    assert batch.is_complete


def test_an_answer_begins_anew_where_the_engine_refuses_what_it_was_to_be_resumed_from(model, table):
    spec = JobSpec.parse(model=str(model), sampling={"max_tokens": 2})
    known = {"0": Begun((4,)), "1": Begun((5,))}
    batch = RowBatch(table, (), asking(spec, known), RECEIPT)
    first, second = batch.requests
    (anew,) = batch.record([Refusal(first.request_id, "not its tokens", has_run=False), answer(second, 4)])
    assert anew == replace(first, resume_token_ids=())
    assert batch.requests == [anew]
    assert batch.record([Refusal(anew.request_id, "too long", has_run=False)]) == []
    assert batch.take_finished()["error"].to_pylist() == [None, "too long"]


def test_rows_that_are_answered_otherwise_are_not_asked(batch):
    batch.answer({0: {"output": "x"}, 1: {"output": "y"}})
    assert batch.requests == []
    assert batch.take_finished()["output"].to_pylist() == ["x", "y"]


def test_an_answer_of_an_earlier_job_brings_its_receipt(model, table):
    spec = JobSpec.parse(model=str(model), sampling={"temperature": 0})
    names = [field.name for field in part_schema(spec, ()).field("receipt").type]
    here, earlier = ({**dict.fromkeys(names), "device": name} for name in ("here", "earlier"))
    batch = RowBatch(table, (), asking(spec), here)
    batch.answer({0: {"output": "d", "receipt": earlier}})
    batch.record([answer(batch.requests[0], 4)])
    assert [columns["receipt"] for columns in batch.finished_rows().values()] == [earlier, here]
    assert batch.take_finished()["receipt"].to_pylist() == [earlier, here]


def test_every_row_has_a_stop_checker_of_its_own_where_the_job_stops_at_a_text(model, table):
    plain, stopping = (
        RowBatch(table, (), asking(JobSpec.parse(model=str(model), sampling=sampling)), RECEIPT)
        for sampling in ({"temperature": 0}, {"temperature": 0, "stop": ["b"]})
    )
    assert [(each.request_id, list(each.prompt_token_ids)) for each in plain.requests] == [
        ("7/0", [1, 2]),
        ("7/1", [3]),
    ]
    assert [each.stop_checker for each in plain.requests] == [None, None]
    first, second = stopping.requests
    assert first.stop_checker is not None
    assert second.stop_checker is not None
    assert first.stop_checker is not second.stop_checker
    assert replace(first, stop_checker=None) == replace(plain.requests[0], params=first.params)


def test_rows_that_say_themselves_how_they_are_sampled(model):
    tokenizer = Tokenizer.from_pretrained(model)
    own = RowSampling(sampling=SamplingSpec(n=2, temperature=0.5, seed=9, max_tokens=3)).to_json()
    chosen = RowSampling(sampling=SamplingSpec(seed=8), choices=("a", "b")).to_json()
    table = pa.table(
        {
            "row": [0, 1, 2],
            "custom_id": ["0", "1", "2"],
            "prompt_token_ids": [[1, 2], [3], None],
            "plan_error": [None, None, "broken"],
            "row_sampling": [own, chosen, None],
        }
    )
    batch = RowBatch(table, (), asking(JobSpec.parse(model=str(model), endpoint="/v1/completions")), RECEIPT)
    first, second, third = batch.requests
    assert (first.params.temperature, first.params.max_tokens, first.params.seed) == (0.5, 3, 9)
    assert second.fork_of == first.request_id
    assert first.choice_token_ids is None
    assert third.choice_token_ids == tokenizer.encode_choices(("a", "b"))
    for request, token, reason in ((first, 4, FinishReason.STOP), (second, 5, FinishReason.LENGTH)):
        batch.record([Answer(request.request_id, (token,), reason, 0, None, None)])
    broken, answered = batch.take_finished().to_pylist()
    assert (broken["error"], broken["outputs"]) == ("broken", None)
    # The token that stops an answer is no part of it.
    assert answered["outputs"] == ["", "e"]
    assert answered["finish_reasons"] == ["stop", "length"]
