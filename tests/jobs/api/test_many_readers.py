"""A thousand connections that wait for the same answer, on a server that was started with room for few files."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequest, LiveRequests
from headrace.jobs.settings import Settings
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEnd
from headrace.jobs.streams.publisher import StreamPublisher

from ..running import environment
from .own_server import start_server

NUM_READERS = 1000
# More than this process has open.
FEW_FILES = 128


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """With another limit to the files that this process, and those it starts, may have open."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def reader(address: tuple[str, int], path: str) -> socket.socket:
    """A connection that has asked for a stream and reads nothing of it."""
    connection = socket.create_connection(address, timeout=120)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_thousand_idle_readers_keep_nobody_out_and_miss_nothing(tmp_path: Path) -> None:
    few_files = psutil.Process().num_fds() + FEW_FILES
    assert few_files < NUM_READERS
    with open_files(few_files):
        server = start_server(tmp_path)
    url = urlsplit(str(server.http.base_url))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    request = LiveRequest.new(queue="headrace.live.nobody", model="m", prompt_token_ids=[1], sampling=SamplingSpec())
    with (
        open_files(hard),
        Client(Settings.from_environment(environment(tmp_path))) as client,
        LiveRequests(client.redis_url, client.celery) as requests,
        StreamPublisher(client.redis_url) as publisher,
        ExitStack() as connections,
    ):
        connections.callback(server.stop)
        requests.submit(request)
        (stream_id,) = request.stream_ids
        address = (str(url.hostname), int(url.port or 0))
        readers = [
            connections.enter_context(reader(address, f"/requests/{request.id}/stream")) for _ in range(NUM_READERS)
        ]
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in readers)
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.submit().status_code == 201
        publisher.open(stream_id, 1)
        publisher.append(stream_id, [5, 6], ["a", "b"])
        publisher.finish(stream_id, StreamEnd("stop"))
        assert publisher.flush(60)
        for each in readers:
            events = read_to_the_end(each)
            assert events.count(b'"type":"tokens"') == 1
            assert events.count(b"event: end") == 1
