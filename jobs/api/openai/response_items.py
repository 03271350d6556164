"""The items of a response's input, and the messages that they become. Source: OpenAI's Responses API."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from ..schemas import Text
from .chat_schemas import Role
from .request_body import UNSUPPORTED, Body, Ignored, Unsupported, listed


class InputPart(Body):
    """A piece of an item's content: text, however it came about, or an image in a data URL."""

    type: Literal["input_text", "output_text", "reasoning_text", "text", "refusal", "input_image"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | None = None
    file_id: Unsupported = None
    detail: Ignored = None
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None

    @model_validator(mode="after")
    def _has_what_it_is(self) -> Self:
        name = {"input_image": "image_url", "refusal": "refusal"}.get(self.type, "text")
        if getattr(self, name) is None:
            raise ValueError(f"a part of type {self.type} must have {name!r}")
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.type == "input_image":
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        return {"type": "text", "text": self.refusal if self.type == "refusal" else self.text}


def _parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else listed(content, "parts")


Parts = Annotated[list[InputPart], BeforeValidator(_parts, json_schema_input_type=str | list[InputPart])]
# What each type of item has to have.
_REQUIRED: Mapping[str, Sequence[str]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_UNFINISHED = ("in_progress", "incomplete")


class SummaryPart(Body):
    """What is told of a thought where the whole of it is not."""

    type: Literal["summary_text"]
    text: Text


def _kind(given: Any) -> Any:
    # Vercel's AI SDK sends it where it is not told otherwise.
    if given == "item_reference":
        advice = "nothing is kept here: send the item itself, as clients do with store false"
        raise PydanticCustomError(UNSUPPORTED, "{advice}", {"advice": advice})
    return given


class InputItem(Body):
    """A turn of the conversation. What an earlier response had as `output` may be sent back as it came."""

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning"], BeforeValidator(_kind)
    ] = "message"
    role: Role | None = None
    content: Parts | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Parts | None = None
    id: Ignored = None
    status: Text | None = None
    phase: Ignored = None
    summary: list[SummaryPart] | None = None
    encrypted_content: Ignored = None
    namespace: Unsupported = None
    caller: Ignored = None

    @model_validator(mode="after")
    def _has_what_it_is(self) -> Self:
        if missing := next((name for name in _REQUIRED[self.type] if getattr(self, name) is None), None):
            raise ValueError(f"an item of type {self.type} must have {missing!r}")
        return self

    @property
    def is_begun(self) -> bool:
        """Whether it is an answer that was cut off, to be gone on with where nothing follows it."""
        is_answer = self.type == "message" and self.role == "assistant"
        return is_answer and self.status in _UNFINISHED and any(part.text for part in self.content or ())

    @property
    def thought(self) -> str:
        """Of an item of type reasoning, as much as is told of it."""
        whole = "".join(part.text or "" for part in self.content or ())
        return whole or "\n".join(part.text for part in self.summary or ())


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """A conversation's items as the messages of a chat: what is thought is told with what follows it."""
    messages: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for item in items:
        if item.type == "reasoning":
            thought = {"reasoning": thought.get("reasoning", "") + item.thought}
            continue
        if item.type == "function_call":
            # Calls of one turn are of one message, with what was said before them, unless there is a thought between.
            if thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None, **thought})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            messages.append(_message(item, thought if item.role == "assistant" else {}))
        thought = {}
    return messages


def _message(item: InputItem, thought: Mapping[str, Any]) -> dict[str, Any]:
    if item.type == "function_call_output":
        output = [part.for_chat() for part in item.output or ()]
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    return {"role": item.role, "content": [part.for_chat() for part in item.content or ()], **thought}


def _call(item: InputItem) -> dict[str, Any]:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
