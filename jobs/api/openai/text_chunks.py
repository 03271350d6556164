"""A streamed plain completion's chunks, as the bytes of server-sent events."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...streams.events import StreamEvent
from .answer_bodies import TEXT_COMPLETION, Head, Usage
from .asking import Asked
from .chunks import DONE, NO_END, ChunkWriter, end_fields
from .logprobs import LogprobEntries, text_logprobs
from .running_usage import RunningUsage


class TextChunks:
    """The chunks of the choices, each behind its prompt where that is echoed.

    The log-probabilities of an echoed prompt come with the first tokens of its first choice: until then all of its
    choices wait.
    """

    done = DONE
    error = staticmethod(ChunkWriter.error)

    def __init__(self, head: Head, includes_usage: bool, asked: Asked, running: RunningUsage | None = None) -> None:
        self._writer = ChunkWriter(head, TEXT_COMPLETION, includes_usage, running)
        self._asked = asked
        # Where the next token of each choice begins.
        self._offsets: dict[int, int] = {}
        self._waiting: dict[int, list[StreamEvent]] = {}

    def begin(self, index: int) -> Iterator[bytes]:
        echo = self._asked.echo(index)
        self._offsets[index] = len(echo)
        if self._asked.has_prompt_logprobs:
            self._waiting[index] = []
        elif echo:
            yield self._chunk(index, echo)

    def add(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        if index not in self._waiting:
            yield from self._answer(index, event)
            return
        self._waiting[index].append(event)
        if event.prompt_logprobs is not None:
            for each in range(index, index + self._asked.samples):
                yield from self._echo(each, event.prompt_logprobs)

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage)

    def _echo(self, index: int, prompt_logprobs: LogprobEntries) -> Iterator[bytes]:
        yield self._chunk(index, self._asked.echo(index), text_logprobs(prompt_logprobs, 0))
        for event in self._waiting.pop(index):
            yield from self._answer(index, event)

    def _answer(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        if self._asked.echoes_only:
            if event.is_final:
                yield self._chunk(index, "", None, {"finish_reason": "length", "stop_reason": None})
            return
        logprobs = None
        if self._asked.has_logprobs and event.logprobs:
            logprobs = text_logprobs(event.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(token) for token in logprobs["tokens"])
        if event.text or logprobs or event.is_final:
            yield self._chunk(index, event.text, logprobs, end_fields(event) if event.is_final else NO_END)

    def _chunk(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None = None, end: Mapping[str, Any] = NO_END
    ) -> bytes:
        return self._writer.choice({"index": index, "text": text, "logprobs": logprobs, **end})
