"""A worker's live requests in this process: a real Redis, and a model that is a function of its tokens."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery
from redis import Redis

from headrace.engine.request import Request
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.broker.celery_app import create_app
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.live.claims import LiveClaim, LiveClaims
from headrace.jobs.live.requests import LiveRequest, LiveRequests
from headrace.jobs.live.runner import LiveRunner
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.jobs.streams.reader import follow

from ...engine.fakes import CONTEXT, fake_answer
from ..answers import WAIT_SECONDS, GatedRunner, hosted

TTL_SECONDS = 600
# Longer than two workers take to start, however busy the machine.
LONG = 600.0
PROMPT = (1, 2, 3)
# Draws rather than takes the likeliest token, so that a wrong place in the seed's sequence shows.
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 20, "ignore_eos": True}


def claim_one(claims: LiveClaims, request_id: str) -> LiveClaim | None:
    """None where it has ended or another attempt has it."""
    return next(iter(claims.claim_all([request_id])), None)


@dataclass
class InProcessWorker:
    """The live half of a worker. Its engine computes a step a permit, or freely while the gate is open."""

    runner: GatedRunner
    host: EngineHost
    claims: LiveClaims
    live: LiveRunner
    publisher: StreamPublisher


@dataclass
class Desk:
    """Producers, readers and any number of workers around one Redis; the queue is the test's own."""

    valkey: EmbeddedValkey
    model: Path
    queue: str
    app: Celery
    requests: LiveRequests
    owners: Iterator[int]

    @property
    def url(self) -> str:
        return self.valkey.url

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_pretrained(self.model)

    @contextmanager
    def worker(
        self,
        lease_seconds: float = LONG,
        grace_seconds: float = 0.0,
        max_num_seqs: int = 8,
        num_slots: int = 256,
        enable_prefix_caching: bool = False,
        num_states: int = 0,
    ) -> Iterator[InProcessWorker]:
        """Bells are not brought by Celery here: `live.ring` is called instead."""
        runner, owner = GatedRunner(num_states), f"worker {next(self.owners)}"
        with (
            hosted(runner, max_num_seqs, enable_prefix_caching) as (host, _),
            StreamPublisher(self.url, TTL_SECONDS) as publisher,
            LiveClaims(self.url, self.app, self.queue, owner, lease_seconds, TTL_SECONDS) as claims,
            LiveRunner(host, self.tokenizer, publisher, claims, grace_seconds, num_slots) as live,
        ):
            try:
                yield InProcessWorker(runner, host, claims, live, publisher)
            finally:
                if not grace_seconds:
                    live.drain()

    def request(self, prompt: Sequence[int] = PROMPT, *, timeout_seconds: float = LONG, **more: Any) -> LiveRequest:
        fields = {name: more.pop(name) for name in ("choices", "images", "tenant", "reply_to") if name in more}
        return LiveRequest.new(
            queue=self.queue,
            model=str(self.model),
            prompt_token_ids=prompt,
            sampling=SamplingSpec(**SAMPLING | more),
            timeout_seconds=timeout_seconds,
            **fields,
        )

    def submitted(self, *prompt: int, **more: Any) -> LiveRequest:
        request = self.request(prompt or PROMPT, **more)
        self.requests.submit(request)
        return request

    def events(self, stream_id: str, after: int = 0) -> list[StreamEvent]:
        """The whole stream, each token once and in order."""
        events = list(follow(self.url, stream_id, after, timeout=WAIT_SECONDS))
        for event, following in itertools.pairwise(events):
            assert following.first == event.last + 1
            assert not event.is_final
        assert events[0].first == after + 1
        return events

    def num_streamed(self, stream_id: str) -> int:
        """How many tokens are in Redis now."""
        with self.requests._redis.pipeline() as pipe:
            newest = pipe.xrevrange(f"headrace:stream:{stream_id}", count=1).execute()[0]
        return int(newest[0][0].partition("-")[0]) if newest else 0

    def tokens(self, request: LiveRequest, sample: int = 0) -> list[int]:
        """What the undisturbed engine answers."""
        params = request.sampling.params(request.choices).of_sample(sample)
        return fake_answer(Request("r", request.prompt_token_ids, params), CONTEXT)

    def assert_streamed(self, request: LiveRequest, sample: int = 0) -> list[StreamEvent]:
        """The sample's stream is what the engine answers undisturbed."""
        events = self.events(request.stream_ids[sample])
        expected = self.tokens(request, sample)
        streamed = [token for event in events for token in event.token_ids]
        assert streamed == expected, (streamed, expected)
        assert "".join(event.text for event in events) == self.tokenizer.decode(expected)
        assert events[-1].finish_reason in ("stop", "length")
        assert events[-1].usage.completion_tokens == len(expected)
        return events


def new_desk(valkey: EmbeddedValkey, model: Path, queue: str, app: Celery, requests: LiveRequests) -> Desk:
    return Desk(valkey, model, queue, app, requests, itertools.count(1))


@contextmanager
def opened_desk(valkey: EmbeddedValkey, model: Path, queue: str) -> Iterator[Desk]:
    app = create_app(valkey.url)
    with LiveRequests(valkey.url, app, TTL_SECONDS) as requests:
        yield new_desk(valkey, model, queue, app, requests)
    app.close()


def error_of(desk: Desk, stream_id: str) -> str:
    end = desk.events(stream_id)[-1]
    assert end.finish_reason == "error"
    return end.error.code


def heard(desk: Desk, worker: InProcessWorker, wait_until) -> None:
    """Answer the next bell that was rung over Redis."""

    def take() -> bool:
        with Redis.from_url(desk.url) as redis:
            return redis.lpop(desk.queue) is not None

    wait_until(take, "a bell rings")
    with Redis.from_url(desk.url, decode_responses=True) as redis:
        (request_id,) = redis.zrange(f"headrace:live:open:{desk.queue}", 0, -1)
    worker.live.ring(request_id)


def stop_after(desk, worker: InProcessWorker, request, num_tokens: int, wait_until) -> None:
    """Let the closed engine compute so many tokens, and wait until they are streamed."""
    worker.runner.permit(num_tokens)
    wait_until(lambda: desk.num_streamed(request.id) == num_tokens, f"{num_tokens} tokens are streamed")


def when_told(host: EngineHost, method: str, monkeypatch) -> threading.Event:
    """Set as soon as the host has got such a command: before its next step it carries it out."""
    told, tell = threading.Event(), getattr(host, method)

    def tell_and_note(*args) -> None:
        tell(*args)
        told.set()

    monkeypatch.setattr(host, method, tell_and_note)
    return told
