"""A server in a thread of this process, over a data folder in which no worker takes anything."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.server import Server, http_config
from headrace.jobs.client.client import Client

from ..running import MODEL


class InProcessServer:
    """What is open when it is told to stop is told so at once."""

    def __init__(self, client: Client) -> None:
        app = create_app(client, ServedModels.of([str(MODEL)]))
        self._server = Server(http_config(app), app.state.stopping, told_after_seconds=0.05)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def in_process_server(client: Client) -> Iterator[InProcessServer]:
    server = InProcessServer(client)
    try:
        yield server
    finally:
        server.stop()
