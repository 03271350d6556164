"""Batches with the official `openai` client against a server and a worker; nothing else talks to them here."""

import asyncio
import json
import time
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError
from openai.types import Completion
from openai.types.chat import ChatCompletion

from ...api_server import ApiServer
from ...running import LABELS, MODEL
from ..batch_lines import CHAT, chat_line, create, file_lines, jsonl, wait_for

WORDS = "Where is my parcel, please?"
EXPIRY: dict[str, Any] = {"anchor": "created_at", "seconds": 7200}


def completion_of(line: dict[str, Any]) -> ChatCompletion:
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    return ChatCompletion.model_validate(line["response"]["body"], strict=True)


def error_of(line: dict[str, Any], status_code: int = 400) -> dict[str, Any]:
    assert line["error"] is None
    assert line["response"]["status_code"] == status_code
    assert line["response"]["request_id"].startswith("req_")
    return line["response"]["body"]["error"]


def test_a_batch_whose_lines_ask_in_different_ways(openai_client: Any) -> None:
    began = int(time.time())
    plain = [chat_line(f"row-{number}", f"{WORDS} {number}") for number in range(70)]
    own = [
        chat_line("two", WORDS, n=2, temperature=1, seed=7, logprobs=True, top_logprobs=3),
        chat_line("label", WORDS, structured_outputs={"choice": list(LABELS)}),
        chat_line("short", WORDS, max_tokens=1, ignore_eos=True),
        chat_line("seeded", WORDS, temperature=1.5, seed=11, max_tokens=12, ignore_eos=True),
        chat_line("hot", WORDS, temperature=-1),
        chat_line("no messages", WORDS, messages=[]),
        chat_line("streamed", WORDS, stream=True),
        chat_line("unknown", WORDS, temprature=1),
        chat_line("long", "word " * 5000),
        chat_line("token", WORDS, logit_bias={"99999999": 1}),
    ]
    batch = create(openai_client, [*plain, *own], metadata={"team": "support"}, output_expires_after=EXPIRY)
    assert batch.object == "batch"
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"team": "support"})
    assert began <= batch.created_at <= time.time()
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = wait_for(openai_client, batch)
    assert done.status == "completed"
    assert (done.model, done.errors, done.metadata) == (MODEL.name, None, {"team": "support"})
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert [done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at] == [None] * 4
    assert done.request_counts.model_dump() == {"total": 80, "completed": 74, "failed": 6}
    answers, errors = file_lines(openai_client, done.output_file_id), file_lines(openai_client, done.error_file_id)
    assert answers.keys() | errors.keys() == {line["custom_id"] for line in [*plain, *own]}
    completions: dict[str, Any] = {custom_id: completion_of(line) for custom_id, line in answers.items()}
    assert len({line["id"] for line in [*answers.values(), *errors.values()]}) == 80

    two, seeded = completions["two"], completions["seeded"]
    assert [choice.index for choice in two.choices] == [0, 1]
    for choice in two.choices:
        assert choice.finish_reason in ("stop", "length")
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    assert completions["label"].choices[0].message.content in LABELS
    assert completions["short"].choices[0].finish_reason == "length"
    assert completions["short"].usage.completion_tokens == 1
    # The same request, asked while somebody waits.
    live = openai_client.chat.completions.create(
        model=MODEL.name,
        messages=own[3]["body"]["messages"],
        temperature=1.5,
        seed=11,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    assert seeded.choices[0].message.content == live.choices[0].message.content
    assert seeded.system_fingerprint == live.system_fingerprint

    faults = {custom_id: error_of(line) for custom_id, line in errors.items()}
    assert {custom_id: (fault["code"], fault["param"]) for custom_id, fault in faults.items()} == {
        "hot": ("invalid_value", "temperature"),
        "no messages": ("invalid_value", "messages"),
        "streamed": ("invalid_value", "stream"),
        "unknown": ("unknown_parameter", "temprature"),
        "long": ("context_length_exceeded", "messages"),
        "token": ("invalid_value", "logit_bias"),
    }
    assert {fault["type"] for fault in faults.values()} == {"invalid_request_error"}

    usages: list[Any] = [completion.usage for completion in completions.values()]
    assert done.usage.input_tokens == sum(usage.prompt_tokens for usage in usages)
    assert done.usage.output_tokens == sum(usage.completion_tokens for usage in usages)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert done.usage.input_tokens_details.cached_tokens == cached

    output = openai_client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.status) == ("batch_output", "processed")
    assert output.expires_at == output.created_at + EXPIRY["seconds"]
    assert output.bytes == len(openai_client.files.content(output.id).content)


def test_the_same_batch_asynchronously_over_plain_completions(api: ApiServer) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as opened:
            client: Any = opened
            url = "/v1/completions"
            body: dict[str, Any] = {"model": MODEL.name, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
            prompts: dict[str, Any] = {
                "text": "The parcel",
                "tokens": [5, 6, 7],
                "echoed": "The parcel",
                "several": ["a", "b"],
            }
            lines: list[dict[str, Any]] = [
                {"custom_id": name, "method": "POST", "url": url, "body": {**body, "prompt": prompt}}
                for name, prompt in prompts.items()
            ]
            lines[2]["body"] |= {"echo": True}
            file = await client.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
            while batch.status != "completed":
                assert batch.status in ("validating", "in_progress", "finalizing"), batch
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            content = await client.files.content(batch.output_file_id)
            answers = {line["custom_id"]: line for line in map(json.loads, content.text.splitlines())}
            texts = {}
            for name, line in answers.items():
                completion = Completion.model_validate(line["response"]["body"], strict=True)
                texts[name] = completion.choices[0].text
                assert completion.usage.completion_tokens == 3
            assert texts.keys() == {"text", "tokens", "echoed"}
            live = await client.completions.create(
                model=MODEL.name, prompt="The parcel", max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
            )
            assert texts["text"] == live.choices[0].text
            assert texts["echoed"] == "The parcel" + texts["text"]
            (error,) = (await client.files.content(batch.error_file_id)).text.splitlines()
            assert error_of(json.loads(error))["param"] == "prompt"
            assert batch.id in [each.id async for each in client.batches.list(limit=1)]

    asyncio.run(run())


def test_a_file_with_faults_fails_with_their_lines(openai_client: Any) -> None:
    good = chat_line("a")
    lines = [
        json.dumps(good).encode(),
        b"{not json",
        b"",
        json.dumps(good).encode(),
        json.dumps(good | {"custom_id": "b", "method": "GET"}).encode(),
        json.dumps(good | {"custom_id": "c", "url": "/v1/completions"}).encode(),
        json.dumps({**good, "custom_id": None}).encode(),
        json.dumps(good | {"custom_id": "d", "body": []}).encode(),
        json.dumps(chat_line("e", model="other")).encode(),
        json.dumps(good | {"custom_id": "f", "body": {}}).encode(),
        b"[1]",
    ]
    file = openai_client.files.create(file=("faults.jsonl", b"\n".join(lines)), purpose="batch")
    batch = openai_client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    failed = wait_for(openai_client, batch)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert failed.output_file_id is failed.error_file_id is failed.in_progress_at is None
    assert [(error.line, error.code, error.param) for error in failed.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_method", "method"),
        (6, "invalid_url", "url"),
        (7, "missing_required_parameter", "custom_id"),
        (8, "invalid_type", "body"),
        (9, "mismatched_model", "body.model"),
        (10, "missing_required_parameter", "body.model"),
        (11, "invalid_json_line", None),
    ]
    assert "line 1" in failed.errors.data[1].message
    with pytest.raises(ConflictError):
        openai_client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("lines", "code"),
    [([], "empty_file"), ([chat_line("a", model="gpt-5")], "model_not_found")],
    ids=["no line", "unknown model"],
)
def test_a_batch_that_names_nothing_to_run_fails(openai_client: Any, lines: list[Any], code: str) -> None:
    failed = wait_for(openai_client, create(openai_client, lines))
    assert (failed.status, failed.errors.data[0].code) == ("failed", code)


def test_a_batch_all_of_whose_requests_fail_completes_without_output(openai_client: Any) -> None:
    done = wait_for(openai_client, create(openai_client, [chat_line("a", temperature=-1), chat_line("b", n=0)]))
    assert (done.status, done.output_file_id) == ("completed", None)
    assert done.request_counts.model_dump() == {"total": 2, "completed": 0, "failed": 2}
    assert file_lines(openai_client, done.error_file_id).keys() == {"a", "b"}


def test_what_can_not_be_a_batch_is_refused(openai_client: Any) -> None:
    file = openai_client.files.create(file=("lines.jsonl", jsonl([chat_line("a")])), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "1.5h"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"key": "x" * 513}}, "metadata.key"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ):
        with pytest.raises(BadRequestError) as refused:
            openai_client.batches.create(**{**good, **change})
        assert refused.value.param == param
        assert " items after" not in refused.value.message or param == "metadata"
    for missing in ("file-000000000000000000000000", "../../etc/passwd"):
        with pytest.raises(NotFoundError) as unknown:
            openai_client.batches.create(**{**good, "input_file_id": missing})
        assert (unknown.value.param, unknown.value.code) == ("input_file_id", "file_not_found")
    output = wait_for(openai_client, create(openai_client, [chat_line("a")])).output_file_id
    with pytest.raises(BadRequestError) as wrong_purpose:
        openai_client.batches.create(**{**good, "input_file_id": output})
    assert wrong_purpose.value.param == "input_file_id"


def test_batches_are_listed_newest_first_page_by_page(openai_client: Any) -> None:
    ids = [create(openai_client, []).id for _ in range(3)]
    page = openai_client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1]
    assert page.has_more
    assert (page.first_id, page.last_id) == (ids[2], ids[1])
    listed = [batch.id for batch in openai_client.batches.list(limit=2)]
    assert listed[:3] == ids[::-1]
    assert len(listed) == len(set(listed))
    for call in (openai_client.batches.retrieve, openai_client.batches.cancel):
        with pytest.raises(NotFoundError):
            call("batch_none")
    with pytest.raises(NotFoundError) as cursor:
        openai_client.batches.list(after="batch_none")
    assert cursor.value.param == "after"
    with pytest.raises(BadRequestError):
        openai_client.batches.list(limit=101)


def test_a_cancelled_batch_keeps_what_was_finished(openai_client: Any) -> None:
    # Some that are finished soon, and more than enough for the time until it is cancelled.
    num_tokens = [30 if number < 64 else 500 for number in range(800)]
    lines = [chat_line(f"row-{n}", f"{n}", max_tokens=tokens, ignore_eos=True) for n, tokens in enumerate(num_tokens)]
    batch = create(openai_client, lines)
    while not (batch := wait_for(openai_client, batch, "in_progress")).request_counts.completed:
        batch = openai_client.batches.retrieve(batch.id)
    assert batch.request_counts.total == 800
    stopping = openai_client.batches.cancel(batch.id)
    assert stopping.status in ("cancelling", "cancelled")
    assert stopping.cancelling_at is not None
    done = wait_for(openai_client, stopping)
    assert openai_client.batches.cancel(batch.id).status == done.status == "cancelled"
    assert done.cancelled_at is not None
    answers, errors = file_lines(openai_client, done.output_file_id), file_lines(openai_client, done.error_file_id)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (800, len(answers), len(errors))
    assert len(answers) >= batch.request_counts.completed
    assert errors
    assert answers.keys() ^ errors.keys() == {line["custom_id"] for line in lines}
    for line in errors.values():
        assert line["response"] is None
        assert line["error"]["code"] == "batch_cancelled"
    for custom_id, line in answers.items():
        assert completion_of(line).usage.completion_tokens == num_tokens[int(custom_id.removeprefix("row-"))]
