"""A conversation's messages as chat templates want them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError
from ..vision.reading import IMAGE_PARTS, has_images


def check_messages(messages: Sequence[Any]) -> None:
    """Raises `InvalidRequestError` saying which message of a conversation a chat template would make nonsense of."""
    if not messages:
        raise _invalid("a conversation has at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _invalid(f"message {number} must be an object with a role, not {message!r}")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            _check_part(part, number)
        if not isinstance(content, str | list | None):
            raise _invalid(f"message {number}: content must be a text or a list of parts, not {content!r}")


def _check_part(part: Any, number: int) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_PARTS:
        return
    if kind != "text" or not isinstance(part.get("text"), str):
        kinds = ", ".join(("text", *IMAGE_PARTS))
        raise _invalid(f"message {number}: a part of content must be an object of type {kinds}, not {part!r}")


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages: {problem}", "messages")


def with_plain_texts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, in which parts become one text: templates of models that read texts would write the list out.

    Those with images are left as they are.
    """
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list) and not has_images([message])
        else message
        for message in messages
    ]


def with_read_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of each call as an object: OpenAI's have JSON, which templates would quote.

    Others, as DeepSeek's, add them to texts: there they are that JSON.
    """
    return [_with_read_calls(message) if message.get("tool_calls") else message for message in messages]


def _with_read_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    return {**message, "tool_calls": [_read_call(call) for call in calls]} if isinstance(calls, list) else message


def _read_call(call: Any) -> Any:
    """What is no JSON stays a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    read = _Arguments(arguments, text) if isinstance(arguments, dict) else arguments
    return {**call, "function": {**function, "arguments": read}}


class _Arguments(dict[str, Any]):
    """A call's, which are their JSON in sums of texts."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text
