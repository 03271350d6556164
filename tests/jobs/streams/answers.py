"""Answers for the tests to stream, and what their readers must have got."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.jobs.streams.events import StreamEnd, StreamEvent, StreamUsage
from headrace.jobs.streams.publisher import StreamPublisher

# What a token may add: nothing yet, characters of several bytes, what JSON and Redis have to escape.
PIECES = ("", " a", "é", "漢字", '"', "\\", "\r\n", "🙂", "]", ",", "\x00", " the")


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    rest: str

    @property
    def text(self) -> str:
        return "".join(self.texts) + self.rest

    @property
    def usage(self) -> StreamUsage:
        return StreamUsage(7, 3, len(self.token_ids))


def answer_of(num_tokens: int, seed: int = 0) -> Answer:
    chance = random.Random(seed)
    token_ids = tuple(chance.randrange(150_000) for _ in range(num_tokens))
    return Answer(token_ids, tuple(chance.choice(PIECES) for _ in range(num_tokens)), chance.choice(PIECES))


def append(publisher: StreamPublisher, stream_id: str, answer: Answer, start: int, stop: int) -> None:
    publisher.append(stream_id, answer.token_ids[start:stop], answer.texts[start:stop])


def finish(publisher: StreamPublisher, stream_id: str, answer: Answer) -> None:
    publisher.finish(stream_id, StreamEnd("stop", answer.rest, answer.usage))


def write(publisher: StreamPublisher, stream_id: str, answer: Answer, batch: int, reply_to: str | None = None) -> None:
    """All of it, in entries of `batch` tokens."""
    publisher.open(stream_id, 1, reply_to)
    for start in range(0, len(answer.token_ids), batch):
        append(publisher, stream_id, answer, start, start + batch)
        assert publisher.flush(30)
    finish(publisher, stream_id, answer)


def check(events: Iterable[StreamEvent], answer: Answer, after: int = 0) -> None:
    """Each token that comes after once, in order, then the end."""
    *tokens, end = events
    numbers = [event.first + at for event in tokens for at in range(len(event.token_ids))]
    assert numbers == list(range(after + 1, len(answer.token_ids) + 1))
    assert tuple(token for event in tokens for token in event.token_ids) == answer.token_ids[after:]
    assert tuple(text for event in tokens for text in event.texts) == answer.texts[after:]
    assert "".join(event.text for event in (*tokens, end)) == "".join(answer.texts[after:]) + answer.rest
    assert [event.is_final for event in tokens] == [False] * len(tokens)
    assert (end.finish_reason, end.usage, end.last) == ("stop", answer.usage, len(answer.token_ids))
