"""A streamed response's events, as the bytes of server-sent events. Source: OpenAI's streaming events."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...calls.events import CallDelta, CallEvent
from ...streams.events import StreamEvent, ThoughtEvent
from ..errors import ApiError
from .answer_bodies import Head, Usage
from .chunks import to_json
from .logprobs import LogprobEntries
from .response_bodies import (
    COMPLETED,
    begun,
    call_item,
    ended,
    item_id,
    last_status,
    message_item,
    reasoning_item,
    text_logprobs,
    text_part,
)

_CONTENT = {"content_index": 0}
Told = tuple[str, Mapping[str, Any]]


class OpenItem(ABC):
    """An item of the output while it grows. What it yields are events' types and their own fields."""

    def __init__(self, number: str) -> None:
        self.number = number
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]: ...
    @abstractmethod
    def begin(self) -> Iterator[Told]: ...
    @abstractmethod
    def end(self) -> Iterator[Told]: ...


class OpenThought(OpenItem):
    def item(self, status: str) -> dict[str, Any]:
        item = reasoning_item(self.number, self.text, status)
        return item if status != "in_progress" else {**item, "content": []}

    def begin(self) -> Iterator[Told]:
        yield "response.content_part.added", {**_CONTENT, "part": {"type": "reasoning_text", "text": ""}}

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        yield "response.reasoning_text.delta", {**_CONTENT, "delta": text}

    def end(self) -> Iterator[Told]:
        yield "response.reasoning_text.done", {**_CONTENT, "text": self.text}
        yield "response.content_part.done", {**_CONTENT, "part": {"type": "reasoning_text", "text": self.text}}


class OpenMessage(OpenItem):
    def __init__(self, number: str) -> None:
        super().__init__(number)
        self._logprobs: list[Mapping[str, Any]] = []

    def item(self, status: str) -> dict[str, Any]:
        parts = [] if status == "in_progress" else [text_part(self.text, self._logprobs)]
        return message_item(self.number, parts, status)

    def begin(self) -> Iterator[Told]:
        yield "response.content_part.added", {**_CONTENT, "part": text_part("", None)}

    def add(self, text: str, logprobs: LogprobEntries | None) -> Iterator[Told]:
        self._texts.append(text)
        self._logprobs += logprobs or ()
        yield "response.output_text.delta", {**_CONTENT, "delta": text, "logprobs": text_logprobs(logprobs)}

    def end(self) -> Iterator[Told]:
        part = text_part(self.text, self._logprobs)
        yield "response.output_text.done", {**_CONTENT, "text": self.text, "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**_CONTENT, "part": part}


class OpenCall(OpenItem):
    def __init__(self, number: str, delta: CallDelta) -> None:
        super().__init__(number)
        self._call_id, self._name = str(delta.id), str(delta.name)

    def item(self, status: str) -> dict[str, Any]:
        return call_item(self.number, self._call_id, self._name, self.text, status)

    def begin(self) -> Iterator[Told]:
        yield from ()

    def add(self, arguments: str) -> Iterator[Told]:
        self._texts.append(arguments)
        yield "response.function_call_arguments.delta", {"delta": arguments}

    def end(self) -> Iterator[Told]:
        yield "response.function_call_arguments.done", {"arguments": self.text, "name": self._name}


@dataclass
class ResponseEvents:
    """The events of a response, told one stream event after the other. `told_again`: what it says of its request."""

    head: Head
    told_again: Mapping[str, Any]
    done = b""
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: OpenItem | None = None
    # Log-probabilities of tokens without a text: of half a character, or of what becomes a call.
    _held: list[Mapping[str, Any]] = field(default_factory=list)
    _num_events: int = 0
    _finish_reason: str = ""

    def begin(self, _index: int) -> Iterator[bytes]:
        yield self._event("response.created", {"response": begun(self.head, self.told_again)})
        yield self._event("response.in_progress", {"response": begun(self.head, self.told_again)})

    def add(self, _index: int, event: StreamEvent) -> Iterator[bytes]:
        if isinstance(event, ThoughtEvent) and event.reasoning:
            thought = self._open if isinstance(self._open, OpenThought) else OpenThought(self._next_id())
            yield from self._turn_to(thought)
            yield from self._of_item(thought.add(event.reasoning))
        self._held += event.logprobs or ()
        if event.text or (self._held and isinstance(self._open, OpenMessage)):
            yield from self._say(event.text)
        for delta in event.calls if isinstance(event, CallEvent) else ():
            yield from self._call(delta)
        if event.is_final:
            if self._open is None:
                yield from self._say("") if self._held else self._turn_to(OpenMessage(self._next_id()))
            yield from self._close(last_status(str(event.finish_reason)))
            self._finish_reason = str(event.finish_reason)

    def usage(self, usage: Usage) -> bytes:
        """The last event."""
        whole = ended(self.head, self.told_again, self._output, self._finish_reason, usage)
        return self._event(f"response.{whole['status']}", {"response": whole})

    def error(self, error: ApiError) -> bytes:
        """What ends the stream instead."""
        told = {"code": error.code, "message": str(error.detail), "param": error.param}
        failed = {**begun(self.head, self.told_again), "status": "failed", "output": self._output}
        failed["error"] = {"code": error.code or "server_error", "message": str(error.detail)}
        return self._event("error", told) + self._event("response.failed", {"response": failed})

    def _say(self, text: str) -> Iterator[bytes]:
        message = self._open if isinstance(self._open, OpenMessage) else OpenMessage(self._next_id())
        yield from self._turn_to(message)
        held, self._held = self._held, []
        yield from self._of_item(message.add(text, held))

    def _call(self, delta: CallDelta) -> Iterator[bytes]:
        # A call has none.
        self._held = []
        if delta.id is not None:
            yield from self._turn_to(OpenCall(self._next_id(), delta))
        assert isinstance(self._open, OpenCall)
        yield from self._of_item(self._open.add(delta.arguments))

    def _next_id(self) -> str:
        return item_id(self.head, len(self._output) + (self._open is not None))

    def _turn_to(self, item: OpenItem) -> Iterator[bytes]:
        """Close the item before, unless it is the same."""
        if item is self._open:
            return
        yield from self._close(COMPLETED)
        self._open = item
        told = {"output_index": len(self._output), "item": item.item("in_progress")}
        yield self._event("response.output_item.added", told)
        yield from self._of_item(item.begin())

    def _close(self, status: str) -> Iterator[bytes]:
        if self._open is None:
            return
        yield from self._of_item(self._open.end())
        whole, self._open = self._open.item(status), None
        yield self._event("response.output_item.done", {"output_index": len(self._output), "item": whole})
        self._output.append(whole)

    def _of_item(self, told: Iterator[Told]) -> Iterator[bytes]:
        assert self._open is not None
        where = {"item_id": self._open.number, "output_index": len(self._output)}
        for kind, fields in told:
            yield self._event(kind, {**where, **fields})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {to_json(body)}\n\n".encode()
