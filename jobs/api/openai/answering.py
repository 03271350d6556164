"""A response's choices as they come from the workers: collected into one body, or streamed in chunks."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Protocol, TypeVar

from anyio import create_memory_object_stream
from anyio.streams.memory import MemoryObjectSendStream

from ...calls.events import merged_calls
from ...streams.events import StreamError, StreamEvent, ThoughtEvent
from ..errors import CLIENT_CLOSED_REQUEST, RETRY_SOON, ApiError
from ..live_answers import UNAVAILABLE, LiveAnswers
from .answer_bodies import Answer, Usage
from .asking import Asked
from .running_usage import RunningUsage

T = TypeVar("T")
# Events of several choices that wait for a slow client; more stay in Redis.
_MAX_WAITING_EVENTS = 32
_PROPER_ENDS = ("stop", "length")
_CANCELLED = StreamError("cancelled", "the request was cancelled")
# Any other error is the server's fault. Clients repeat what got 5xx by themselves.
_STATUSES = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "cancelled": CLIENT_CLOSED_REQUEST,
    "deadline_exceeded": 504,
    "unavailable": 503,
}


class AnswerFailed(ApiError):
    """An answer that ended with an error, or was called off."""

    def __init__(self, error: StreamError) -> None:
        super().__init__(_STATUSES.get(error.code, 500), error.message, error.code)
        if self.status_code == 503:
            self.headers = RETRY_SOON


class Chunks(Protocol):
    """How one kind of response is written in chunks; `done` is the last of all."""

    done: bytes

    def begin(self, index: int) -> Iterator[bytes]: ...
    def add(self, index: int, event: StreamEvent) -> Iterator[bytes]: ...
    def usage(self, usage: Usage) -> bytes: ...
    def error(self, error: ApiError) -> bytes: ...


async def collect(answers: LiveAnswers, asked: Asked) -> tuple[list[Answer], Usage]:
    """All choices, complete, in their order, and what they took. Raises `AnswerFailed`."""
    collected: list[list[StreamEvent]] = [[] for _ in range(asked.num_choices)]
    usage = Usage()
    async with aclosing(choice_events(answers, asked)) as events:
        async for choice, event in events:
            collected[choice].append(event)
            usage += _usage(asked, choice, event)
    return [_answer(asked, choice, collected) for choice in range(asked.num_choices)], usage


def _answer(asked: Asked, choice: int, collected: Sequence[Sequence[StreamEvent]]) -> Answer:
    events, of_first = collected[choice], collected[choice - choice % asked.samples]
    echo, prompt_logprobs = asked.echo(choice), of_first[0].prompt_logprobs
    if asked.echoes_only:
        return Answer.of_prompt(echo, prompt_logprobs)
    text = "".join(event.text for event in events)
    entries = [entry for event in events for entry in event.logprobs or ()] if asked.has_logprobs else None
    thought = "".join(event.reasoning for event in events if isinstance(event, ThoughtEvent))
    reasoning = thought if asked.parsers and asked.parsers[choice].is_told else None
    end, stopped = str(events[-1].finish_reason), events[-1].stop_reason
    return Answer(text, end, entries, echo, prompt_logprobs, reasoning, merged_calls(events), stopped)


async def chunk_stream(
    answers: LiveAnswers, asked: Asked, chunks: Chunks, includes_usage: bool, running: RunningUsage | None = None
) -> AsyncGenerator[bytes, None]:
    """All choices in chunks, as server-sent events; an answer that fails ends it with an error.

    `running` is told what the chunks are to tell.
    """
    usage = Usage()
    for choice in range(asked.num_choices):
        for chunk in chunks.begin(choice):
            yield chunk
    try:
        async with aclosing(choice_events(answers, asked)) as events:
            async for choice, event in events:
                usage += _usage(asked, choice, event)
                if running is not None:
                    running.add(choice, event)
                for chunk in chunks.add(choice, event):
                    yield chunk
    except AnswerFailed as error:
        yield chunks.error(error)
        return
    if includes_usage:
        yield chunks.usage(usage)
    if chunks.done:
        yield chunks.done


async def choice_events(answers: LiveAnswers, asked: Asked) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """The events of all choices as they come, each with its choice's number. Raises `AnswerFailed`."""
    streams = [answers.events(request, sample) for request in asked.requests for sample in range(asked.samples)]
    timer = answers.latencies.timer(asked.model.name, asked.arrived_at)
    async with aclosing(merged(streams)) as events:
        async for choice, event in events:
            timer.note(choice, event)
            if event.is_final:
                # One that only Redis keeps from going on has not ended.
                if event.error != UNAVAILABLE:
                    asked.open_choices.discard(choice)
                expect_proper(event)
            yield choice, asked.parsed(choice, event)
    timer.end()


def expect_proper(end: StreamEvent) -> None:
    """Raises `AnswerFailed` for an end that is none of a complete answer."""
    if end.finish_reason not in _PROPER_ENDS:
        raise AnswerFailed(end.error or _CANCELLED)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several streams bring, as it comes, each with its stream's number; what they raise is raised here."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    send, receive = create_memory_object_stream[tuple[int, T]](_MAX_WAITING_EVENTS)
    # It ends when the last clone of its sending side is closed.
    with send, receive:
        tasks = [asyncio.ensure_future(_send_all(*item, send.clone())) for item in enumerate(streams)]
        send.close()
        try:
            async for numbered in receive:
                yield numbered
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _send_all(number: int, stream: AsyncGenerator[T, None], send: MemoryObjectSendStream[tuple[int, T]]) -> None:
    with send:
        async with aclosing(stream) as items:
            async for item in items:
                await send.send((number, item))


def _usage(asked: Asked, choice: int, event: StreamEvent) -> Usage:
    """What an answer's end tells; a prompt counts once, whatever the number of its answers."""
    if event.usage is None:
        return Usage()
    usage = Usage(**asdict(event.usage))
    if asked.parsers:
        usage = replace(usage, reasoning_tokens=asked.parsers[choice].num_tokens)
    if choice % asked.samples:
        usage = Usage(completion_tokens=usage.completion_tokens, reasoning_tokens=usage.reasoning_tokens)
    return replace(usage, completion_tokens=0) if asked.echoes_only else usage
