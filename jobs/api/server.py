"""The server's process: listen, serve, and leave in good order."""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ..client import Client
from ..errors import JobError
from ..settings import Settings
from .app import create_app
from .models import ServedModels

# Requests under way when told to stop. Docker kills after ten seconds.
_GRACE_SECONDS = 8
_BACKLOG = 2048


class ListenError(JobError):
    """The address can not be listened on."""


def serve(settings: Settings, models: ServedModels, host: str, port: int, on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread. Port 0 picks a free one.

    `on_listening` is told the URL once connections are taken. Raises `ListenError`, or what `Client` raises.
    """
    with _listen(host, port) as listener, Client(settings) as client:
        config = uvicorn.Config(
            create_app(client, models),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        with _stopping_on_signals(server):
            on_listening(_url(host, listener))
            server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host} port {port}: {reason}; choose with --host and --port") from error


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _stopping_on_signals(server: uvicorn.Server) -> Iterator[None]:
    """Leave regularly when told to stop: once it has ended, uvicorn raises the signals it has taken again."""

    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
