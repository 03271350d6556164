"""A web server of the tests' own: takes webhooks, serves files, and says what has come."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """`statuses`: what the next POST requests are answered; then 200. `files`: what GET requests get by their path.

    `redirects`: where GET and POST requests for a path are sent.
    """

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    receiver.hold.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            receiver.hold.wait(20)
            if self.path in receiver.redirects:
                self._answer(302, receiver.redirects[self.path])
            else:
                self._answer(receiver.statuses.pop(0) if receiver.statuses else 200)

        def do_GET(self) -> None:
            if self.path in receiver.redirects:
                self._answer(302, receiver.redirects[self.path])
                return
            content = receiver.files.get(self.path)
            self._answer(404 if content is None else 200, content=content or b"")

        def _answer(self, status: int, location: str | None = None, content: bytes = b"") -> None:
            self.send_response(status)
            if location is not None:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
