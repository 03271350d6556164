"""The live requests of the session's server and worker, as Redis has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from redis import Redis

from headrace.jobs.broker.celery_app import live_queue
from headrace.jobs.client.client import Client
from headrace.jobs.live.keys import open_key
from headrace.jobs.live.requests import LiveRecord, LiveRequests, LiveState
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.streams.events import StreamEvent
from headrace.jobs.streams.reader import follow

from ..conftest import wait_until
from ..running import MODEL, environment

_TRIES = 5


class LiveDesk:
    def __init__(self, client: Client, requests: LiveRequests) -> None:
        self._redis = Redis.from_url(client.redis_url, decode_responses=True)
        self._url = client.redis_url
        self._requests = requests

    def open_ids(self) -> list[str]:
        return [str(name) for name in self._redis.zrange(open_key(live_queue(str(MODEL), Precision())), 0, -1)]

    def get(self, request_id: str) -> LiveRecord:
        return self._requests.get(request_id)

    def has_ended(self, request_id: str) -> bool:
        return self.get(request_id).state is LiveState.ENDED

    def cancel(self, request_id: str) -> None:
        self._requests.cancel(request_id)

    def events(self, stream_id: str, after: int = 0) -> list[StreamEvent]:
        """All there are, once the stream has ended."""
        return list(follow(self._url, stream_id, after, timeout=60))

    def cut_short(self, leave: Callable[[], str]) -> str:
        """The stream that `leave` asked for and left, once it has ended before its answer was complete.

        On a machine that is slow with whoever is to notice, the answer may be there first: then it is asked again.
        """
        for _ in range(_TRIES):
            stream_id = leave()
            wait_until(partial(self.has_ended, stream_id.partition("/")[0]), "the request has ended")
            if self.events(stream_id)[-1].finish_reason not in ("stop", "length"):
                return stream_id
        raise AssertionError(f"of {_TRIES} requests that were left none was cut short")

    def forget(self, *keys: str) -> None:
        self._redis.delete(*keys)


@contextmanager
def live_desk(data_dir: Path) -> Iterator[LiveDesk]:
    with (
        Client(Settings.from_environment(environment(data_dir))) as client,
        LiveRequests(client.redis_url, client.celery) as requests,
    ):
        yield LiveDesk(client, requests)
