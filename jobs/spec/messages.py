"""A chat's messages as users send them: what they have to be, and their texts; and what else templates are told."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.text.messages import with_plain_texts
from ...engine.vision.reading import has_images
from .json_values import json_problem

_NO_CONTENT = "must hold objects with 'role' and 'content'"
# A message's fields that have to do with calls of tools, and what was thought.
_FURTHER = ("tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content", "thinking")
# What a template is told by us.
_OURS = frozenset(("messages", "tools", "add_generation_prompt"))


def messages_problem(messages: Any) -> str | None:
    """What is wrong with a conversation, as the end of a sentence about it; None if it can be put into a template."""
    if not isinstance(messages, list) or not messages:
        return "must be a non-empty list"
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return _NO_CONTENT
        if not _is_content(message.get("content")):
            return "can have as 'content' a text, or parts of type 'text' or 'image_url', and nothing else"
    has_content = all("content" in message for message in messages)
    return _NO_CONTENT if not has_content and says_nothing(messages) else None


def says_nothing(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has neither images nor texts of more than blanks."""
    texts = (message.get("content") for message in with_plain_texts(messages))
    return not has_images(messages) and not any(str(text or "").strip() for text in texts)


def _is_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(map(_is_part, content))
    return content is None or isinstance(content, str)


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    return part.get("type") in ("image_url", "image")


def without_absent(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without fields of calls and thoughts that are null, as templates ask whether they are there.

    Where columns have a type, messages without such have them.
    """
    return [_without_absent(message) for message in messages]


def _without_absent(message: Mapping[str, Any]) -> Mapping[str, Any]:
    absent = [name for name in _FURTHER if name in message and not message[name]]
    return {name: value for name, value in message.items() if name not in absent} if absent else message


def template_kwargs_problem(kwargs: Any) -> str | None:
    """What is wrong with `chat_template_kwargs`, as the end of a sentence about them; None if nothing is."""
    if not isinstance(kwargs, Mapping):
        return 'must be an object, such as {"enable_thinking": false}'
    if taken := sorted(_OURS & kwargs.keys()):
        return f"can not have {taken[0]!r}, which is set here: leave it out"
    return json_problem(kwargs)
