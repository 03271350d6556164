"""Between clients and a Redis: one of its answers comes in half, and the rest of it never."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socketserver import BaseRequestHandler, ThreadingTCPServer

_CHUNK_BYTES = 65536


@dataclass(frozen=True)
class HalfReplies:
    """`address`: where to connect, as HOST:PORT. `has_cut`: whether an answer was cut."""

    address: str
    has_cut: threading.Event


@contextmanager
def half_replies(server_socket: str, marker: bytes) -> Iterator[HalfReplies]:
    """Listens for the server on a UNIX socket.

    The first answer that has `marker` in it is cut; its connection stays open until the client closes it.
    """
    has_cut = threading.Event()

    class Connection(BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as server, suppress(OSError):
                server.connect(server_socket)
                asking = threading.Thread(target=self._ask, args=(server,))
                asking.start()
                self._answer(server)
                asking.join()

        def _ask(self, server: socket.socket) -> None:
            with suppress(OSError):
                while data := self.request.recv(_CHUNK_BYTES):
                    server.sendall(data)
                server.shutdown(socket.SHUT_RDWR)

        def _answer(self, server: socket.socket) -> None:
            while data := server.recv(_CHUNK_BYTES):
                if marker in data and not has_cut.is_set():
                    self.request.sendall(data[: len(data) // 2])
                    has_cut.set()
                    return
                self.request.sendall(data)

    class Proxy(ThreadingTCPServer):
        daemon_threads = True

    with Proxy(("127.0.0.1", 0), Connection) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield HalfReplies(f"127.0.0.1:{proxy.server_address[1]}", has_cut)
        finally:
            proxy.shutdown()
            serving.join()
