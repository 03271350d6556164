"""Interactive requests on behalf of HTTP clients: handed to workers, followed, and called off when nobody waits."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, compress

from anyio.to_thread import run_sync
from redis.exceptions import RedisError

from ..client.client import Client
from ..embedded.valkey import EmbeddedValkeyError
from ..live.cancellations import Cancellations
from ..live.in_batches import InBatches
from ..live.requests import REQUEST_ID, LiveRecord, LiveRequest, LiveRequests, LiveState, UnknownRequest
from ..rare_warnings import RareWarnings
from ..streams.events import StreamError, StreamEvent
from ..streams.hub import HubClosed, StreamHub
from ..streams.reader import StreamTimeout
from ..workers.presence import WorkerPresence
from .errors import ApiError, too_many_open
from .latencies import Latencies
from .models import ServedModel
from .worker_watch import WorkerWatch

logger = logging.getLogger(__name__)

# After so long without a token it is asked whether the request is still known.
_CHECK_SECONDS = 30.0
_LAST_SECONDS = 1.0
# For how long Redis has to take nothing in: a failover takes less.
_REFUSED_SECONDS = 10.0
# The thread of submissions has nothing to do when none come.
_TICK_SECONDS = 60.0


@dataclass(frozen=True)
class _Submission:
    requests: Sequence[LiveRequest]
    done: "Future[None]" = field(default_factory=Future)


class LiveAnswers:
    """Plain methods block and are thread-safe; asynchronous ones belong to the hub's event loop."""

    def __init__(
        self,
        client: Client,
        requests: LiveRequests,
        workers: WorkerWatch,
        hub: StreamHub,
        latencies: Latencies,
    ) -> None:
        self._client = client
        self._requests = requests
        self._hub = hub
        self.workers = workers
        self.latencies = latencies
        self._awaited: set[asyncio.Task[None]] = set()
        # One thread for all: in a burst handing over is a call of Redis and a bell for many.
        self._submissions = InBatches[_Submission]("live submissions", self._submit_all, _TICK_SECONDS)
        self._cancellations = Cancellations(requests)
        self._warnings = RareWarnings(logger)

    @classmethod
    @asynccontextmanager
    async def opened(cls, client: Client, requests: LiveRequests, latencies: Latencies) -> "AsyncIterator[LiveAnswers]":
        """Connected to the client's Redis, which need not answer yet. `requests` stays the caller's.

        `latencies`: where it is noted how long answers take.
        """
        with WorkerPresence(client.redis_url) as presence:
            async with StreamHub(client.redis_url) as hub:
                answers = cls(client, requests, WorkerWatch(client, presence), hub, latencies)
                # In this order: what cannot be submitted is called off.
                with answers._cancellations, answers._submissions:
                    yield answers

    @property
    def hub(self) -> StreamHub:
        return self._hub

    @property
    def reader_id(self) -> str:
        """What requests that are to be followed here name as their `reply_to`."""
        return self._hub.reader_id

    def num_waiting(self, model: ServedModel) -> int:
        """How many requests for it no worker has. Raises redis' errors."""
        return self._requests.num_waiting(model.live_queue)

    def submit(self, requests: Sequence[LiveRequest]) -> "Future[None]":
        """Queue all or none, together with what others submit at this time. The result may be one of redis' errors."""
        submission = _Submission(requests)
        for request in requests:
            for stream_id in request.stream_ids:
                self._hub.expect(stream_id)
        self._submissions.put(submission)
        return submission.done

    def forget(self, requests: Iterable[LiveRequest]) -> None:
        """Whatever has not been followed by now will not be. To be called once for all that was submitted."""
        for request in requests:
            for stream_id in request.stream_ids:
                self._hub.forget(stream_id)

    def _submit_all(self, submissions: list[_Submission]) -> None:
        """In the thread of submissions."""
        groups = [submission.requests for submission in submissions]
        try:
            are_taken = self._requests.register(groups, self._client.settings.max_open_requests)
            self._requests.ring(*(each for group in compress(groups, are_taken) for each in group))
        # The boundary: whoever waits is to hear of it.
        except Exception as error:  # noqa: BLE001
            self.cancel(chain.from_iterable(groups))
            for submission in submissions:
                submission.done.set_exception(error)
            return
        for submission, is_taken in zip(submissions, are_taken, strict=True):
            if is_taken:
                submission.done.set_result(None)
            else:
                submission.done.set_exception(too_many_open())

    def cancel(self, requests: Iterable[LiveRequest]) -> None:
        """Have requests end soon, or once Redis takes anything in again; returns at once."""
        self._cancellations.add(requests)

    def get(self, request_id: str, tenant: str) -> LiveRecord:
        """A request of the tenant's. Raises `ApiError` (404), `LaterVersion`, and redis' errors."""
        if REQUEST_ID.fullmatch(request_id):
            try:
                record = self._requests.get(request_id)
            except UnknownRequest:
                pass
            else:
                if record.request.tenant == tenant:
                    return record
        raise ApiError(404, f"request {request_id!r} does not exist", "request_not_found", "request_id")

    async def events(
        self, request: LiveRequest, sample: int = 0, after: int = 0, has_ended: bool = False
    ) -> AsyncGenerator[StreamEvent, None]:
        """The stream of one of a request's samples after the token `after`, up to its end.

        `has_ended`: the request has, so that the end is there if it is anywhere.
        It ends with an error where nothing more is to be waited for: `stream_lost` when Redis has lost the request or
        its tokens, `deadline_exceeded`, and `unavailable` when Redis takes nothing in.
        """
        framed, doubt = request.reply_to == self.reader_id, _LOST if has_ended else None
        while True:
            patience = _patience(doubt)
            events = self._hub.events(request.stream_ids[sample], after, framed=framed, timeout=patience)
            try:
                async with aclosing(events):
                    async for event in events:
                        after, doubt = event.last, None
                        yield event
                return
            except StreamTimeout as timeout:
                # Twice: the end may come meanwhile, or Redis be well again. And only what was looked for can be lost.
                doubted, doubt = doubt, await run_sync(self._doubt, request)
                if doubted is not None and doubt is not None and (timeout.has_looked or doubt is not _LOST):
                    yield StreamEvent(after + 1, finish_reason="error", error=doubt)
                    return

    def when_ended(self, answers: Sequence[tuple[LiveRequest, int]], then: Callable[[], object]) -> None:
        """Have `then` called once all of these samples of requests have ended, or nobody knows of them any more."""
        task = asyncio.ensure_future(self._await_ends(answers, then))
        # The loop itself keeps no hold of its tasks.
        self._awaited.add(task)
        task.add_done_callback(self._awaited.discard)

    async def _await_ends(self, answers: Sequence[tuple[LiveRequest, int]], then: Callable[[], object]) -> None:
        try:
            with suppress(HubClosed):
                for answer in answers:
                    async for _ in self.events(*answer):
                        pass
        finally:
            then()

    def _doubt(self, request: LiveRequest) -> StreamError | None:
        """Why nothing more of an answer is to be waited for; None while it may come, also when Redis can not say."""
        try:
            self._client.ensure_redis()
            if self._requests.get(request.id).state is LiveState.ENDED:
                return _LOST
        except UnknownRequest:
            return _LOST
        except EmbeddedValkeyError as error:
            self._warnings.warn(f"requests wait for nothing any more: {error}")
            return UNAVAILABLE
        except RedisError:
            return _LATE if request.is_overdue else None
        if request.is_overdue:
            return _LATE
        return None if self._requests.accept_writes() else UNAVAILABLE


def _patience(doubt: StreamError | None) -> float:
    """How long to wait for a token, in seconds."""
    if doubt is None:
        return _CHECK_SECONDS
    return _REFUSED_SECONDS if doubt is UNAVAILABLE else _LAST_SECONDS


_LOST = StreamError("stream_lost", "Redis has lost the request or its tokens: send it again")
_LATE = StreamError("deadline_exceeded", "the request's deadline has passed")
UNAVAILABLE = StreamError("unavailable", "Redis takes nothing in, its disk or memory may be full: try again later")
