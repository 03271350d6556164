"""`headrace run-batch`: requests in OpenAI's batch format in, their answers out, whatever came between."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.jobs.batches.offline import OfflineBatches
from headrace.jobs.cli import run_batch
from headrace.jobs.cli.follow import accompany
from headrace.jobs.client.client import Client, Job

from ..running import MODEL, assert_refused, write_lines

CHAT = "/v1/chat/completions"


def request(number: int, **changes: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"Parcel {number} is late"}], "max_tokens": 3}
    body = {"model": MODEL.name, **asked, **changes.pop("body", {})}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body, **changes}


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def run(served, headrace, tmp_path):
    def run(*requests: dict[str, Any], more: tuple[str, ...] = ()) -> Any:
        file = write_lines(tmp_path / "in.jsonl", *requests)
        return headrace(served, "run-batch", "-i", file, "-o", tmp_path / "out.jsonl", "--model", MODEL, *more)

    return run


@pytest.fixture
def files(served):
    """What the store holds."""
    return lambda: {path.name for path in (served / "files").glob("file-*")}


def test_each_request_has_one_line_in_its_place(run, served, tmp_path, files):
    asked = [request(number) for number in range(12)]
    asked[3]["body"]["temperature"] = -1
    before = files()
    done = run(*asked)
    assert done.status == 0, done.err
    assert "12 of 12: 11 generated, 0 kept from before, 1 failed" in done.out
    assert f"output      {tmp_path / 'out.jsonl'}" in done.out
    lines = answers(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == [each["custom_id"] for each in asked]
    failed = lines.pop(3)
    assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["param"]) == (400, "temperature")
    for line in lines:
        assert line["response"]["body"]["model"] == MODEL.name
        assert line["response"]["body"]["choices"][0]["message"]["content"]
    # The requests alone: `headrace verify` asks them again.
    (kept,) = files() - before
    assert (served / "files" / kept).read_bytes() == (tmp_path / "in.jsonl").read_bytes()


def test_an_answer_file_is_replaced_only_if_asked(run, tmp_path):
    assert run(request(0), request(1)).status == 0
    first = answers(tmp_path / "out.jsonl")
    assert_refused(run(request(0), request(1)), "--output-file", "exists: pass --overwrite")
    assert "2 of 2: 2 generated" in run(request(0), request(1), more=("--overwrite",)).out
    again = answers(tmp_path / "out.jsonl")
    assert [line["id"] for line in again] != [line["id"] for line in first]


def test_answers_do_not_replace_their_requests(run, tmp_path):
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "in.jsonl")
    assert_refused(run(request(0), more=("--overwrite",)), "--output-file", "is the input file: name another")
    assert [each["method"] for each in answers(tmp_path / "in.jsonl")] == ["POST"]


def test_other_endpoints_and_names(run, tmp_path):
    body = {"model": "gpt-4o-mini", "prompt": "Where is", "max_tokens": 2}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    done = run(asked, more=("--served-model-name", "gpt-4o-mini"))
    assert done.status == 0, done.err
    (line,) = answers(tmp_path / "out.jsonl")
    assert line["response"]["body"]["object"] == "text_completion"
    assert line["response"]["body"]["model"] == "gpt-4o-mini"


def test_requests_that_cannot_be_asked_are_named_and_nothing_is_left(run, tmp_path, files):
    before = files()
    others = [request(number, body={"model": "gpt"}) for number in range(4)]
    done = run(*others, request(4, url="/v1/embeddings"), {"custom_id": "x"})
    assert (done.status, done.out) == (2, "")
    name = tmp_path / "in.jsonl"
    assert done.err.splitlines() == [
        f"headrace: {name} line 1 (and 3 other lines): The model 'gpt' is not served here: use model. "
        "Pass --served-model-name to answer to that name.",
        f"headrace: {name} line 5: 'url' must be '/v1/chat/completions', the endpoint of the batch.",
        f"headrace: {name} line 6: Missing required parameter: 'method'.",
    ]
    assert files() == before
    assert not (tmp_path / "out.jsonl").exists()


def test_what_is_interrupted_goes_on(run, tmp_path, monkeypatch):
    asked = [request(number) for number in range(6)]

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_batch, "accompany", interrupted)
        stopped = run(*asked)
    assert stopped.status == 130
    assert "of 6 requests are answered and kept (headrace cancel job_" in stopped.err
    assert not (tmp_path / "out.jsonl").exists()
    job = stopped.err.partition("headrace cancel ")[2].split()[0]
    done = run(*asked)
    assert done.out.split()[1] == job
    assert [line["custom_id"] for line in answers(tmp_path / "out.jsonl")] == [each["custom_id"] for each in asked]


def test_answers_that_were_not_delivered_are(run, tmp_path, monkeypatch):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OfflineBatches, "deliver", interrupted)
        assert run(request(0), request(1)).status == 130
    done = run(request(0), request(1))
    assert "2 of 2: 0 generated, 2 kept from before" in done.out
    assert len(answers(tmp_path / "out.jsonl")) == 2


def test_answers_that_could_not_be_written_are_kept(served, headrace, tmp_path, monkeypatch):
    asked, folder = write_lines(tmp_path / "in.jsonl", request(0), request(1)), tmp_path / "folder"
    command = ("run-batch", "-i", asked, "-o", folder / "out.jsonl", "--model", MODEL)

    def accompanied(*arguments: Any) -> Any:
        try:
            return accompany(*arguments)
        finally:
            folder.rmdir()

    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(run_batch, "accompany", accompanied)
        failed = headrace(served, *command)
    assert failed.status == 1
    assert f"headrace: cannot write {folder / 'out.jsonl'}: No such file or directory. The answers are" in failed.err
    folder.mkdir()
    assert "2 of 2: 0 generated, 2 kept from before" in headrace(served, *command).out
    assert len(answers(folder / "out.jsonl")) == 2


def test_of_a_job_that_was_deleted_nothing_is_delivered(run, served, headrace, tmp_path, monkeypatch):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OfflineBatches, "deliver", interrupted)
        stopped = run(request(0))
    job = stopped.err.partition("headrace cancel ")[2].split()[0]
    assert headrace(served, "delete", job).status == 0
    assert "1 of 1: 1 generated" in run(request(0)).out


def test_files_that_can_not_be_used(served, headrace, tmp_path):
    asked = write_lines(tmp_path / "in.jsonl", request(0))
    for words, *arguments in (
        ("does not exist", "-i", asked, "-o", tmp_path / "none/out.jsonl"),
        ("no file that can be written", "-i", asked, "-o", tmp_path),
        ("none.jsonl", "-i", tmp_path / "none.jsonl", "-o", tmp_path / "out.jsonl"),
    ):
        assert_refused(headrace(served, "run-batch", *arguments, "--model", MODEL), words)


def test_run_says_which_command_answers_them(served, headrace, tmp_path):
    asked = write_lines(tmp_path / "in.jsonl", request(0))
    refused = headrace(served, "run", asked, "--model", MODEL, "--output", tmp_path / "out")
    assert_refused(refused, "requests of OpenAI's Batch API: `headrace run-batch`")


def test_one_that_is_cancelled_says_so_of_each_request(headrace, tmp_path, monkeypatch):
    def cancelled(client: Client, job: Job, *others: Any) -> Any:
        job.cancel()
        return accompany(client, job, *others)

    monkeypatch.setattr(run_batch, "accompany", cancelled)
    file = write_lines(tmp_path / "in.jsonl", request(0), request(1))
    arguments = ("run-batch", "-i", file, "-o", tmp_path / "out.jsonl", "--model", MODEL)
    # Nobody works there.
    assert headrace(tmp_path / "data", *arguments).status == 1
    lines = answers(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == ["r0", "r1"]
    assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}
