"""Readers of token streams that hold out while everything is disturbed: each token once, in order, none missing."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from headrace.engine.request import Request
from headrace.jobs.broker.celery_app import live_queue
from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequest, UnknownRequest
from headrace.jobs.spec.precision import Precision
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEvent

from ..engine.fakes import fake_answer
from .model import CONTEXT, text_of

# What no row's prompt begins with.
LIVE_TOKEN = 10
_LIVE_TOKENS = 40
_PATIENCE_SECONDS = 400.0
_UNREACHABLE = (OSError, RedisError, OperationalError)


@dataclass
class Tally:
    """What readers got.

    `crashed`: requests given up as too many of their workers died; `expired`: a row's stream was gone when its reader
    came back to a new server, which says so.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))


class _Tokens:
    """What one reader has of one stream."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""

    @property
    def last(self) -> int:
        return len(self.token_ids)

    def add(self, first: int, token_ids: list[int], text: str) -> None:
        assert first == self.last + 1, f"token {first} comes after token {self.last}"
        self.token_ids += token_ids
        self.text += text


def live_readers(client: Client, model: str, number: int, tally: Tally, stop: threading.Event) -> None:
    """Ask, follow to the end and compare, one request after the other, until told to stop."""
    asked = 0
    while not stop.is_set():
        _follow_live(client, _request(model, number, asked), tally)
        asked += 1


def _request(model: str, number: int, asked: int) -> LiveRequest:
    prompt = (LIVE_TOKEN, 1 + number, 1 + asked // 10 % 10, 1 + asked % 10)
    sampling = SamplingSpec(temperature=0.8, seed=asked, max_tokens=_LIVE_TOKENS, ignore_eos=True)
    queue = live_queue(model, Precision())
    return LiveRequest.new(
        queue=queue, model=model, prompt_token_ids=prompt, sampling=sampling, timeout_seconds=_PATIENCE_SECONDS
    )


def _follow_live(client: Client, request: LiveRequest, tally: Tally) -> None:
    tokens, end = _Tokens(), None
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while end is None:
        assert time.monotonic() < deadline, f"{request.id} has no end, only {tokens.last} tokens"
        try:
            for event in client.stream(request.id, tokens.last):
                end = _take(event, tokens)
        except UnknownRequest:
            _persistently(lambda: _submit(client, request))
        except _UNREACHABLE:
            time.sleep(0.1)
    expected = fake_answer(Request("r", request.prompt_token_ids, request.sampling.params(None)), CONTEXT)
    if end.error is not None:
        assert end.error.code == "worker_crashed", end.error
        assert tokens.token_ids == expected[: tokens.last]
        tally.counts["crashed"] += 1
        return
    assert tokens.token_ids == expected, f"{request.id}: {tokens.token_ids} instead of {expected}"
    assert tokens.text == text_of(expected)
    tally.counts["answers"] += 1


def _take(event: StreamEvent, tokens: _Tokens) -> StreamEvent | None:
    # A request is given up where its stream stands, which has lost its tokens if Redis was emptied.
    if event.error is None:
        tokens.add(event.first, list(event.token_ids), event.text)
    return event if event.is_final else None


def _submit(client: Client, request: LiveRequest) -> None:
    client.ensure_redis()
    client.live.submit(request)


def _persistently(call: Callable[[], None]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return call()
        except _UNREACHABLE:
            assert time.monotonic() < deadline, "Redis does not come back"
            time.sleep(0.1)


@dataclass
class RowReader:
    """Watches rows of a job over HTTP, one after the other; the server may be gone meanwhile."""

    url: str
    job_id: str
    expected: Callable[[int], str]
    tally: Tally

    def watch(self, row: int) -> None:
        """Until it ends, and compare."""
        tokens, end = _Tokens(), None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while end is None:
            assert time.monotonic() < deadline, f"row {row} has no end, only {tokens.last} tokens"
            try:
                end = self._read(row, tokens)
            except httpx2.HTTPError:
                time.sleep(0.1)
        expected = self.expected(row)
        if "error" in end:
            # Redis was emptied after some of the row was read, and the reader's next server knows no text of it.
            assert end["error"]["code"] == "stream_expired", end
            assert expected.startswith(tokens.text)
            self.tally.counts["expired"] += 1
            return
        assert tokens.text == expected, f"row {row}: {tokens.text!r} instead of {expected!r}"
        self.tally.counts["watched rows"] += 1
        self.tally.counts["tokens of watched rows"] += tokens.last

    def _read(self, row: int, tokens: _Tokens) -> dict[str, Any] | None:
        url = f"{self.url}/jobs/{self.job_id}/rows/{row}/stream"
        with httpx2.stream("GET", url, headers={"Last-Event-ID": str(tokens.last)}, timeout=20) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if event["type"] == "end":
                        tokens.text += event["text"]
                        return dict(event)
                    tokens.add(event["first"], event["token_ids"], event["text"])
        return None


@contextmanager
def reading(*readers: Callable[[threading.Event], None]) -> Iterator[None]:
    """All at once, until the end of the context; raises what one of them raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(readers)) as pool:
        futures: list[Future[None]] = [pool.submit(reader, stop) for reader in readers]
        try:
            yield
        finally:
            stop.set()
        for future in futures:
            future.result()
