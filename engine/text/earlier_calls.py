"""Calls of tools earlier in a conversation, as chat templates read them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_read_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of each call as an object: OpenAI's have JSON, which templates would quote."""
    return [_read(message) if message.get("tool_calls") else message for message in messages]


def _read(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    return {**message, "tool_calls": [_read_call(call) for call in calls]} if isinstance(calls, list) else message


def _read_call(call: Any) -> Any:
    """What is no JSON stays a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
