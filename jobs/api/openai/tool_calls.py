"""An answer's events with the calls in it parted from its text. Formats: vLLM's tool parsers of these names."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Literal, Protocol, Self

from ....engine.errors import InvalidRequestError
from ....engine.text.tokenizer import Tokenizer
from ...streams.events import StreamEvent
from .chat_schemas import ChatCompletionRequest
from .reasoning import ThoughtEvent
from .tools import NamedTool

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
# In templates of models that write nothing but JSON: Mistral, Granite, Llama 3. No text has the first two, which are
# special tokens.
_JSON_SIGNS = ("[TOOL_CALLS]", "<|tool_call|>", '"parameters"')
# Of templates with these marks, but with other than JSON behind them, as Mistral's later ones have a name there.
_OTHER_SIGNS = ("<function=", "<arg_key>", "[ARGS]")
# Letters and digits: Mistral's templates take no other number.
_ID_LENGTH = 9


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

    def __init__(self, key: str, name: str) -> None:
        self._key = key
        self._name = name
        self._has_begun = False

    def add(self, event: StreamEvent) -> CallEvent:
        if not event.text:
            return _parted(event, event.text)
        first = {} if self._has_begun else {"id": _call_id(self._key, 0), "name": self._name}
        self._has_begun = True
        return _parted(event, "", (CallDelta(0, event.text, **first),))


class RequiredCallParser:
    """Of an answer that is a list of calls. What was cut short is no list: it stays text."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._held = ""

    def add(self, event: StreamEvent) -> CallEvent:
        self._held += event.text
        if not event.is_final:
            return _parted(event, "")
        calls = _calls(_decoded(self._held))
        return _ended(event, "" if calls else self._held, calls or (), self._key)


class JsonParser:
    """Of an answer that is calls and nothing else, in a list or parted by semicolons: Llama 3's, Mistral's, Granite's.

    Any other is text, and so is what follows `most` calls.
    """

    def __init__(self, key: str, most: int | None = None) -> None:
        self._key = key
        self._most = most
        self._held = ""
        self._is_text = False

    def add(self, event: StreamEvent) -> CallEvent:
        if self._is_text:
            return _parted(event, event.text)
        self._held += event.text
        begin = self._held.lstrip()
        if event.is_final:
            values = _decoded_all(begin)
            calls = (_calls(values) or ())[: self._most]
            rest = values[len(calls) :] if calls else []
            text = json.dumps(rest, ensure_ascii=False) if rest else "" if calls else self._held
            return _ended(event, text, calls, self._key)
        self._is_text = bool(begin) and begin[0] not in "{["
        return _parted(event, self._held if self._is_text else "")


class HermesParser:
    """Of an answer with calls between `<tool_call>` and `</tool_call>`: Hermes' and Qwen's.

    What is between them and is no call stays text, as does what follows `most` calls. The text is complete in any case:
    nothing of it is lost.
    """

    def __init__(self, key: str, most: int | None = None) -> None:
        self._key = key
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
        return _ended(event, "".join(text), calls, self._key, first)

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
        # Blanks after the last call are none of the text's either.
        yield "" if is_final and num_calls and not given.strip() else given, None


@dataclass(frozen=True)
class CallFormat:
    """How calls stand in an answer's text. `name`: the function whose arguments it is; `most`: so many are taken."""

    kind: Literal["named", "required", "hermes", "json"]
    name: str = ""
    most: int | None = None

    @classmethod
    def of(cls, body: ChatCompletionRequest, tokenizer: Tokenizer) -> Self | None:
        """That of answers to `body`; None where no tool may be called.

        Raises `InvalidRequestError` where the model is to decide and its format is none that is known.
        """
        if isinstance(body.calls, NamedTool):
            return cls("named", body.calls.function.name)
        if body.calls == "none":
            return None
        if body.calls == "required":
            return cls("required")
        return cls(_own_kind(tokenizer), most=1 if body.parallel_tool_calls is False else None)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def parser(self, key: str) -> ToolCallParser:
        """For one answer. The ids of its calls are made of `key`."""
        if self.kind == "named":
            return NamedCallParser(key, self.name)
        if self.kind == "required":
            return RequiredCallParser(key)
        return (HermesParser if self.kind == "hermes" else JsonParser)(key, self.most)


def _own_kind(tokenizer: Tokenizer) -> Literal["hermes", "json"]:
    """How a model calls tools by itself, as its chat template shows it."""
    if tokenizer.template_has("tools") and not any(map(tokenizer.template_has, _OTHER_SIGNS)):
        if tokenizer.template_has(HERMES_BEGIN):
            # As a special token no text has it, and calls are all that is seen.
            return "json" if tokenizer.is_special(HERMES_BEGIN) else "hermes"
        if any(map(tokenizer.template_has, _JSON_SIGNS)):
            return "json"
    raise InvalidRequestError(
        f"tools: the model's chat template has neither {HERMES_BEGIN} nor another form of calls that is known, so that "
        'they could not be found in its answer: say tool_choice "required", a function or "none"',
        "tools",
    )


def _call_id(key: str, index: int) -> str:
    return blake2b(f"{key}/{index}".encode()).hexdigest()[:_ID_LENGTH]


def merged_calls(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    """The calls of a whole answer, as a message has them."""
    merged: list[dict[str, Any]] = []
    for delta in (delta for event in events if isinstance(event, CallEvent) for delta in event.calls):
        if delta.id is not None:
            merged.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        merged[delta.index]["function"]["arguments"] += delta.arguments
    return merged


def _ended(event: StreamEvent, text: str, calls: Sequence[Mapping[str, Any]], key: str, first: int = 0) -> CallEvent:
    deltas = tuple(
        CallDelta(index, json.dumps(call["arguments"], ensure_ascii=False), _call_id(key, index), call["name"])
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


def _decoded_all(text: str) -> list[Any]:
    """The items of a list, or the values that semicolons part; none where there is anything else."""
    values: list[Any] = []
    while text:
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        value = _decoded(text[:end])
        values.extend(value if isinstance(value, list) else [value])
        text = text[end:].lstrip("; \t\r\n")
    return values


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
