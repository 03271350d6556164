"""The chunks of a streamed chat, as the bytes that are sent."""

import json
from typing import Any

import pytest

from headrace.jobs.api.openai.answer_bodies import Head
from headrace.jobs.api.openai.chunks import ChatChunks
from headrace.jobs.streams.events import StreamEvent

TEXTS = ['he said "no"', "back\\slash", "two\nlines\r\n\r\ndata: none", "\x00\x1f\t", "é 😀 \u2028", "{}"]


def chunk_of(text: str, includes_usage: bool) -> tuple[bytes, dict[str, Any]]:
    chunks = ChatChunks(Head.chat("req_1", "m", "m"), includes_usage, has_logprobs=False)
    (data,) = chunks.add(1, StreamEvent(1, (7,), (text,), text=text))
    return data, json.loads(data.removeprefix(b"data: "))


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_chunk_comes_back_whole(text: str) -> None:
    data, chunk = chunk_of(text, includes_usage=False)
    assert chunk["choices"] == [{"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    # Else a line of the text would be one of the event's.
    assert data.count(b"\n") == 2
    assert data.endswith(b"\n\n")


def test_chunk_says_that_usage_comes_later_where_it_was_asked_for() -> None:
    assert chunk_of("a", includes_usage=True)[1]["usage"] is None
    assert "usage" not in chunk_of("a", includes_usage=False)[1]
