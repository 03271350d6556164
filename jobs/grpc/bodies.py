"""A gRPC request as the body of the HTTP request that asks for the same."""

import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from ..api.errors import ApiError
from ..api.openai.chat_schemas import ChatCompletionRequest
from ..api.openai.completion_schemas import CompletionRequest
from ..api.openai.request_body import parse_body
from .headrace_pb2 import GenerateRequest

_PROMPTS = ("messages", "prompt", "prompt_token_ids")


def body_of(request: GenerateRequest) -> ChatCompletionRequest | CompletionRequest:
    """Raises `ApiError` (400) naming the field at fault."""
    values = MessageToDict(request, preserving_proto_field_name=True)
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise ApiError(400, f"give one of {', '.join(_PROMPTS)}", "invalid_value", (given or _PROMPTS)[0])
    if "seed" in values:
        # JSON's numbers have no room for it, so protobuf's JSON makes it a text.
        values["seed"] = int(values["seed"])
    if "response_format" in values:
        values["response_format"] = _response_format(values["response_format"])
    if "messages" in values:
        return parse_body(ChatCompletionRequest, values)
    return _completion(values, given[0])


def _completion(values: dict[str, Any], prompt: str) -> CompletionRequest:
    """`logprobs` is said in another way there: as the number of the likeliest tokens."""
    top_logprobs = values.pop("top_logprobs", None)
    if values.pop("logprobs", False):
        values["logprobs"] = top_logprobs or 0
    elif top_logprobs:
        raise ApiError(400, "top_logprobs has no meaning without logprobs", "invalid_value", "top_logprobs")
    values["prompt"] = values.pop(prompt)
    return parse_body(CompletionRequest, values)


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in given:
        return given
    try:
        schema = json.loads(given["schema"])
    except (ValueError, RecursionError) as error:
        message = f"response_format.schema is not valid JSON: {error}"
        raise ApiError(400, message, "invalid_value", "response_format.schema") from error
    return {"type": given.get("type", ""), "json_schema": {"schema": schema}}
