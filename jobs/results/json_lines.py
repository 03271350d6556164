"""A job's rows as JSON objects: with the data set's columns, or as lines of an OpenAI batch's files."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from ...storage.ledger.records import JobRecord
from ...storage.rows.columns import json_value, plain_rows
from ..shards.deadline import EXPIRED
from ..shards.faults import is_servers
from ..spec.lora import asked_model


def json_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """One object a row, in the table's order.

    No NaN and no infinity; bytes, as images are, as data URLs; times, decimals and the like as text.
    """
    for batch in table.to_batches():
        for row in plain_rows(batch):
            yield {name: json_value(value) for name, value in row.items()}


def openai_lines(job: JobRecord, table: pa.Table) -> Iterator[dict[str, Any]]:
    """One object a row, in the table's order: answers as chat completions, errors as in an error file.

    Source: OpenAI's Batch API, the output of `POST /v1/batches`.
    """
    for batch in table.to_batches():
        for row in plain_rows(batch):
            yield _line(job, row)


def _line(job: JobRecord, row: Mapping[str, Any]) -> dict[str, Any]:
    request_id = f"{job.id}-{row['row']}"
    line = {"id": f"batch_req_{request_id}", "custom_id": row["custom_id"], "response": None, "error": None}
    if row["error"] is None:
        return line | {"response": _response(request_id, 200, _completion(job, request_id, row))}
    if row["error"].startswith(EXPIRED):
        return line | {"error": {"code": "batch_expired", "message": row["error"]}}
    is_ours = is_servers(row["error"])
    error = {"message": row["error"], "type": "server_error" if is_ours else "invalid_request_error"}
    body = {"error": error | {"param": None, "code": None}}
    return line | {"response": _response(request_id, 500 if is_ours else 400, body)}


def _response(request_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": f"req_{request_id}", "body": body}


def _completion(job: JobRecord, request_id: str, row: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
    }
    if _has_thought(job):
        usage["completion_tokens_details"] = {"reasoning_tokens": row["reasoning_tokens"]}
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": int(job.created_at),
        "model": asked_model(job),
        "choices": [_choice(job, row, index, text) for index, text in enumerate(_texts(job, row))],
        "usage": usage,
    }


def _texts(job: JobRecord, row: Mapping[str, Any]) -> list[str]:
    # After a vote there is one answer, whatever the samples said.
    return [row["output"]] if job.spec.get("vote") else row.get("outputs") or [row["output"]]


def _has_thought(job: JobRecord) -> bool:
    """Whether the columns are ours: else the input may have some of their names."""
    return bool(job.spec.get("sampling", {}).get("reasoning"))


def _choice(job: JobRecord, row: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
    """What was thought, the finish reason and the log-probabilities are known of the first answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    if _has_thought(job) and index == 0:
        # As a chat has it.
        message |= {"reasoning": row["reasoning"], "reasoning_content": row["reasoning"]}
    finish_reason = row["finish_reason"]
    if (calls := row.get("tool_calls")) is not None:
        # The calls are in the text as the model has written them.
        message |= {"content": None, "tool_calls": calls}
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    logprobs = row.get("logprobs") if index == 0 else None
    return {
        "index": index,
        "message": message,
        "logprobs": None if logprobs is None else {"content": [_token(token) for token in logprobs], "refusal": None},
        "finish_reason": finish_reason,
    }


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    top = [_plain_token(each) for each in token["top"] or ()]
    return {**_plain_token(token), "top_logprobs": top}


def _plain_token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": list(token["token"].encode())}
