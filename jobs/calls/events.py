"""The calls of tools in an answer, as they come."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, Protocol

from ..streams.events import StreamEvent, ThoughtEvent

# Letters and digits: Mistral's templates take no other number.
_ID_LENGTH = 9


@dataclass(frozen=True)
class CallDelta:
    """A piece of the call number `index` of an answer; the first piece has its `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    @classmethod
    def first(cls, key: str, index: int, name: str, arguments: str) -> "CallDelta":
        """That of a call whose id is made of `key`."""
        return cls(index, arguments, blake2b(f"{key}/{index}".encode()).hexdigest()[:_ID_LENGTH], name)

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

    @classmethod
    def of(
        cls, event: StreamEvent, text: str, calls: Sequence[CallDelta] = (), instead_of_stop: str | None = None
    ) -> "CallEvent":
        """The event with this text and these calls. `instead_of_stop`: how it ends then."""
        given = {each.name: getattr(event, each.name) for each in fields(event)} | {"text": text, "calls": tuple(calls)}
        if instead_of_stop is not None and event.finish_reason == "stop":
            given["finish_reason"] = instead_of_stop
        return cls(**given)


class ToolCallParser(Protocol):
    """Parts a choice's events, one after the other, each once."""

    def add(self, event: StreamEvent) -> CallEvent: ...


def merged_calls(events: Sequence[StreamEvent]) -> list[dict[str, Any]]:
    """The calls of a whole answer, as a message has them."""
    merged: list[dict[str, Any]] = []
    for delta in (delta for event in events if isinstance(event, CallEvent) for delta in event.calls):
        if delta.id is not None:
            merged.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        merged[delta.index]["function"]["arguments"] += delta.arguments
    return merged
