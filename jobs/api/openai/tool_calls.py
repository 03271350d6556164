"""An answer's events with the calls in it parted from its text. Formats: vLLM's tool parsers of these names."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

from ....engine.errors import InvalidRequestError
from ....engine.text.tokenizer import Tokenizer
from ...streams.events import StreamEvent
from .chat_schemas import ChatCompletionRequest
from .reasoning import ThoughtEvent
from .tools import NamedTool

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallDelta:
    """A piece of the call number `index` of an answer; the first piece has its `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def body(self) -> dict[str, Any]:
        """As a chunk has it."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class CallEvent(ThoughtEvent):
    """An event whose `text` is without its calls."""

    calls: tuple[CallDelta, ...] = ()


class ToolCallParser(Protocol):
    """Parts a choice's events, one after the other, each once."""

    def add(self, event: StreamEvent) -> CallEvent: ...


class NamedCallParser:
    """Of an answer that is one function's arguments and nothing else. As with OpenAI it ends with "stop"."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def add(self, event: StreamEvent) -> CallEvent:
        if not event.text:
            return _parted(event, event.text)
        delta = CallDelta(0, event.text) if self._has_begun else CallDelta(0, event.text, new_call_id(), self._name)
        self._has_begun = True
        return _parted(event, "", (delta,))


class RequiredCallParser:
    """Of an answer that is a list of calls. What was cut short is no list: it stays text."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, event: StreamEvent) -> CallEvent:
        self._held += event.text
        if not event.is_final:
            return _parted(event, "")
        calls = _calls(_decoded(self._held))
        return _ended(event, "" if calls else self._held, [] if calls is None else calls)


class HermesParser:
    """Of an answer with calls between `<tool_call>` and `</tool_call>`: Hermes' and Qwen's.

    What is between them and is no call stays text, as does what follows `most` calls. The text is complete in any case:
    nothing of it is lost.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._num_calls = 0
        # Text of which it is not known yet what it is.
        self._held = ""

    def add(self, event: StreamEvent) -> CallEvent:
        self._held += event.text
        text: list[str] = []
        calls: list[Mapping[str, Any]] = []
        for piece, call in self._pieces(event.is_final):
            text.append(piece)
            if call is not None:
                calls.append(call)
        first = self._num_calls
        self._num_calls += len(calls)
        return _ended(event, "".join(text), calls, first)

    def _pieces(self, is_final: bool) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
        """What is known by now, each a text and the call after it."""
        num_calls = self._num_calls
        while (begin := self._held.find(HERMES_BEGIN)) >= 0:
            end = self._held.find(HERMES_END, begin)
            if end < 0 and not is_final:
                # What stands before it may be told; blanks in front of a call are none of the text's.
                before = self._held[:begin].rstrip()
                self._held = self._held[len(before) :]
                yield before, None
                return
            # A model may end without the closing marker.
            after = len(self._held) if end < 0 else end + len(HERMES_END)
            inside = self._held[begin + len(HERMES_BEGIN) : None if end < 0 else end]
            before, whole, self._held = self._held[:begin], self._held[:after], self._held[after:]
            calls = None if num_calls == self._most else _calls([_decoded(inside)])
            num_calls += len(calls or ())
            yield (whole, None) if not calls else (before.rstrip(), calls[0])
        keep = 0 if is_final else _num_held(self._held)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield given, None


def tool_call_parser(body: ChatCompletionRequest, tokenizer: Tokenizer) -> Callable[[], ToolCallParser] | None:
    """What makes the parser of one answer to `body`; None where no tool may be called.

    Raises `InvalidRequestError` where the model is to decide and its format is none that is known.
    """
    if isinstance(body.calls, NamedTool):
        return partial(NamedCallParser, body.calls.function.name)
    if body.calls == "none":
        return None
    if body.calls == "required":
        return RequiredCallParser
    if not tokenizer.template_has(HERMES_BEGIN):
        raise InvalidRequestError(
            f"tools: the model's chat template has no {HERMES_BEGIN}, so that nothing is known of how the model calls "
            'them by itself: say tool_choice "required", a function or "none"',
            "tools",
        )
    return partial(HermesParser, 1 if body.parallel_tool_calls is False else None)


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


def merged_calls(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    """The calls of a whole answer, as a message has them."""
    merged: list[dict[str, Any]] = []
    for delta in (delta for event in events if isinstance(event, CallEvent) for delta in event.calls):
        if delta.id is not None:
            merged.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        merged[delta.index]["function"]["arguments"] += delta.arguments
    return merged


def _ended(event: StreamEvent, text: str, calls: Sequence[Mapping[str, Any]], first: int = 0) -> CallEvent:
    deltas = tuple(
        CallDelta(index, json.dumps(call["arguments"], ensure_ascii=False), new_call_id(), call["name"])
        for index, call in enumerate(calls, first)
    )
    return _parted(event, text, deltas, "tool_calls" if first + len(deltas) else None)


def _parted(
    event: StreamEvent, text: str, calls: tuple[CallDelta, ...] = (), instead_of_stop: str | None = None
) -> CallEvent:
    given = {each.name: getattr(event, each.name) for each in fields(event)} | {"text": text, "calls": calls}
    if instead_of_stop is not None and event.finish_reason == "stop":
        given["finish_reason"] = instead_of_stop
    return CallEvent(**given)


def _decoded(text: str) -> Any:
    try:
        value = json.loads(text)
        # Infinite numbers and halves of characters cannot be handed on.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError):
        return None


def _calls(values: Any) -> list[Mapping[str, Any]] | None:
    """Each with `name` and `arguments`; None if one of them is no call."""
    if not isinstance(values, list):
        return None
    calls: list[Mapping[str, Any]] = []
    for value in values:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, Mapping):
            return None
        calls.append({"name": value["name"], "arguments": arguments})
    return calls


def _num_held(text: str) -> int:
    """How many characters at the end of `text` may belong to a call: the beginning of its marker, blanks before it."""
    longest = min(len(HERMES_BEGIN) - 1, len(text))
    size = next((size for size in range(longest, 0, -1) if HERMES_BEGIN.startswith(text[-size:])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())
