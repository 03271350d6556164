"""A streamed answer's chunks, as the bytes of server-sent events."""

import json
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Any

from ...calls.events import CallEvent
from ...streams.events import StreamEvent, ThoughtEvent
from ..errors import ApiError, error_body
from .answer_bodies import Head, Usage, reasoning_fields
from .logprobs import chat_logprobs
from .running_usage import RunningUsage

CHAT_CHUNK = "chat.completion.chunk"
DONE = b"data: [DONE]\n\n"


# Of a choice that goes on.
NO_END: Mapping[str, Any] = MappingProxyType({"finish_reason": None})
# Made once: `dumps` with options makes one a call.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def end_fields(event: StreamEvent) -> dict[str, Any]:
    """How a choice's last chunk says why it ended."""
    return {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}


class ChunkWriter:
    """Writes the chunks of one response.

    With `includes_usage` each says that its own usage is null, as OpenAI's do, or tells the `running` one, as vLLM's.
    """

    def __init__(self, head: Head, kind: str, includes_usage: bool, running: RunningUsage | None = None) -> None:
        # A chunk a token: what they have in common is written once.
        self._head = to_json(head.body(kind))[:-1]
        self._tail = ',"usage":null}\n\n' if includes_usage else "}\n\n"
        self._running = running

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return self.encoded_choice(choice["index"], to_json(choice))

    def encoded_choice(self, index: int, choice: str) -> bytes:
        tail = self._tail
        if self._running is not None:
            tail = f',"usage":{to_json(self._running.body(index))}}}\n\n'
        return f'data: {self._head},"choices":[{choice}]{tail}'.encode()

    @staticmethod
    def error(error: ApiError) -> bytes:
        """An error within a stream, as OpenAI's clients know it."""
        return f"data: {to_json(error_body(error))}\n\n".encode()

    def usage(self, usage: Usage) -> bytes:
        """The last chunk where usage was asked for."""
        return f'data: {self._head},"choices":[],"usage":{to_json(usage.body())}}}\n\n'.encode()


class ChatChunks:
    """The chunks of a chat's choices, told one stream event after the other. `echo`: what stands in front of each."""

    done = DONE
    error = staticmethod(ChunkWriter.error)

    def __init__(
        self,
        head: Head,
        includes_usage: bool,
        has_logprobs: bool,
        running: RunningUsage | None = None,
        echo: str = "",
    ) -> None:
        self._writer = ChunkWriter(head, CHAT_CHUNK, includes_usage, running)
        self._has_logprobs = has_logprobs
        self._echo = echo

    def begin(self, index: int) -> Iterator[bytes]:
        yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        if self._echo:
            yield self._text_chunk(index, self._echo)

    def add(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        if isinstance(event, ThoughtEvent) and event.reasoning:
            yield self._chunk(index, reasoning_fields(event.reasoning))
        logprobs = chat_logprobs(event.logprobs) if self._has_logprobs and event.logprobs else None
        if logprobs:
            yield self._chunk(index, {"content": event.text}, logprobs)
        elif event.text:
            yield self._text_chunk(index, event.text)
        if isinstance(event, CallEvent) and event.calls:
            yield self._chunk(index, {"tool_calls": [call.body() for call in event.calls]})
        if event.is_final:
            yield self._chunk(index, {}, end=end_fields(event))

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage)

    def _text_chunk(self, index: int, text: str) -> bytes:
        # As `_chunk` would; nearly all chunks are such.
        delta = f'{{"content":{encode_basestring(text)}}}'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'
        return self._writer.encoded_choice(index, choice)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: Mapping[str, Any] | None = None,
        end: Mapping[str, Any] = NO_END,
    ) -> bytes:
        return self._writer.choice({"index": index, "delta": delta, "logprobs": logprobs, **end})
