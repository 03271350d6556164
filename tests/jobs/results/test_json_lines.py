"""Rows as JSON objects, and as lines of an OpenAI batch's files."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from headrace.engine.vision.reading import data_url_bytes
from headrace.jobs.results.json_lines import json_rows, openai_lines
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobRecord, NewJob
from headrace.storage.output.parts import output_schema

from ..running import LABELS, MODEL

ANSWER: dict[str, Any] = {
    "row": 4,
    "custom_id": "r4",
    "output": "Hello",
    "finish_reason": "length",
    "prompt_tokens": 7,
    "cached_tokens": 5,
    "completion_tokens": 2,
}


@pytest.fixture
def job(tmp_path) -> JobRecord:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    ledger.create_job(NewJob("job_1", "q", "org/tiny@0123abc", "/out", "f", num_rows=1), [])
    job = ledger.job("job_1")
    ledger.close()
    return job


def line(job: JobRecord, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    (found,) = openai_lines(job, pa.Table.from_pylist([row], schema=output_schema([], **options)))
    return found


def test_an_answer_is_a_chat_completion(job):
    assert line(job, ANSWER) == {
        "id": "batch_req_job_1-4",
        "custom_id": "r4",
        "error": None,
        "response": {
            "status_code": 200,
            "request_id": "req_job_1-4",
            "body": {
                "id": "chatcmpl-job_1-4",
                "object": "chat.completion",
                "created": int(job.created_at),
                "model": "org/tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 2,
                    "total_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 5},
                },
            },
        },
    }


def test_several_answers_are_several_choices(job):
    choices = line(job, ANSWER | {"outputs": ["Hello", "Hi"]}, with_outputs=True)["response"]["body"]["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "Hello"), (1, "Hi")]


@pytest.mark.parametrize("has_voted", [True, False])
def test_of_answers_that_were_voted_on_the_winner_is_the_choice(job, has_voted):
    """Whatever the input's columns are called: data sets of before have some under names that are ours by now."""
    schema = output_schema([pa.field("votes", pa.int64())], with_outputs=True)
    row = ANSWER | {"outputs": ["Hi", "Hello"], "votes": 3}
    (found,) = openai_lines(replace(job, spec={"vote": has_voted}), pa.Table.from_pylist([row], schema=schema))
    choices = found["response"]["body"]["choices"]
    assert [choice["message"]["content"] for choice in choices] == (["Hello"] if has_voted else ["Hi", "Hello"])


def test_what_was_thought_is_told_as_a_chat_tells_it(job):
    thinking = replace(job, spec={"sampling": {"reasoning": True}})
    row = ANSWER | {"outputs": ["Hello", "Hi"], "reasoning": "Greet.", "reasoning_tokens": 1}
    body = line(thinking, row, with_outputs=True, with_reasoning=True)["response"]["body"]
    thoughts = [choice["message"].get("reasoning") for choice in body["choices"]]
    assert thoughts == [choice["message"].get("reasoning_content") for choice in body["choices"]] == ["Greet.", None]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    # The input's own column of that name.
    table = pa.Table.from_pylist(
        [ANSWER | {"reasoning": "x"}], schema=output_schema([pa.field("reasoning", pa.string())])
    )
    (found,) = openai_lines(job, table)
    assert "reasoning" not in found["response"]["body"]["choices"][0]["message"]


def test_log_probabilities_have_their_bytes(job):
    token = {"token": "é", "token_id": 3, "logprob": -0.5}
    row = ANSWER | {"logprobs": [{**token, "top": [token]}]}
    (choice,) = line(job, row, with_logprobs=True)["response"]["body"]["choices"]
    plain = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    assert choice["logprobs"]["content"] == [{**plain, "top_logprobs": [plain]}]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ("column 'text' is null", 400, "invalid_request_error"),
        ("engine failed: out of memory", 500, "server_error"),
        ("worker_crashed: the worker died", 500, "server_error"),
        ("attempt_failed: TypeError: a mistake of ours", 500, "server_error"),
    ],
)
def test_a_row_that_failed_has_its_error_in_the_body(job, error, status, kind):
    found = line(job, {"row": 0, "custom_id": "r0", "error": error})
    assert found["error"] is None
    assert found["response"]["status_code"] == status
    assert found["response"]["body"] == {"error": {"message": error, "type": kind, "param": None, "code": None}}


def test_a_row_that_never_ran_has_no_response(job):
    found = line(job, {"row": 0, "custom_id": "r0", "error": "expired: too late"})
    assert (found["response"], found["error"]) == (None, {"code": "batch_expired", "message": "expired: too late"})


def test_the_command_writes_them_to_a_file_or_prints_them(served, headrace, tickets, tmp_path):
    options = ["--model", MODEL, "--prompt", "{text}", "--choices", ",".join(LABELS), "--limit", "3"]
    run = headrace(served, "run", tickets, *options, "--output", tmp_path / "out")
    job_id = run.out.split()[1]
    printed = headrace(served, "results", job_id, "--format", "openai").out
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] in LABELS for line in lines)
    wrote = headrace(served, "results", job_id, "--format", "openai", "--output", tmp_path / "lines.jsonl")
    assert (wrote.status, wrote.out) == (0, "")
    assert (tmp_path / "lines.jsonl").read_text() == printed
    refused = headrace(served, "results", job_id, "--output", tmp_path / "nowhere/lines.jsonl")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "nowhere/lines.jsonl" in refused.err


def test_bytes_are_data_urls_that_another_job_can_read():
    (row,) = json_rows(pa.table({"row": [0], "image": [{"bytes": b"\x89PNG", "path": None}]}))
    url = row["image"]["bytes"]
    assert url == "data:application/octet-stream;base64,iVBORw=="
    assert data_url_bytes(url) == b"\x89PNG"
