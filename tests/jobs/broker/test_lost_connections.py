"""Messages over connections that Redis has dropped, and that do not come back at once."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from redis import Redis

from headrace.jobs.broker.celery_app import create_app, ring_for_shards
from headrace.jobs.embedded.valkey import EmbeddedValkey


class DroppingProxy(ThreadingTCPServer):
    """Between clients and a Redis that listens on a UNIX socket; drops connections when it is told to."""

    daemon_threads = True

    def __init__(self, server_socket: Path) -> None:
        super().__init__(("127.0.0.1", 0), BaseRequestHandler)
        self._server_socket = server_socket
        self._open: list[socket.socket] = []
        self._num_doomed = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}/0"

    def drop(self, num_further: int) -> None:
        """All connections that there are, and so many of those to come at their first command."""
        self._num_doomed = num_further
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._num_doomed > 0:
            self._num_doomed -= 1
            request.recv(1)
            return
        with socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(str(self._server_socket))
            self._open.append(request)
            answering = threading.Thread(target=_copy, args=(server, request))
            answering.start()
            _copy(request, server)
            answering.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def dropping_proxy(valkey: EmbeddedValkey) -> Iterator[DroppingProxy]:
    with DroppingProxy(Path(valkey.url.removeprefix("unix://"))) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield proxy
        finally:
            proxy.drop(0)
            proxy.shutdown()
            serving.join()


def test_shards_are_rung_for_whatever_redis_has_dropped_before(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey, dropping_proxy(valkey) as proxy, Redis.from_url(valkey.url) as redis:
        app = create_app(proxy.url)
        ring_for_shards(app, "one", ["job/00000"])
        proxy.drop(1)
        # To a queue that this connection has not seen. Whether the client has tried again by itself is its own affair.
        ring_for_shards(app, "another", ["job/00000"])
        proxy.drop(0)
        before = _num_waiting(redis, "another")
        ring_for_shards(app, "another", ["job/00000", "job/00001"])
        assert _num_waiting(redis, "another") == before + 2
        app.close()


def _num_waiting(redis: Redis, queue: str) -> int:
    return sum(redis.llen(key) for key in redis.keys(f"{queue}*"))
