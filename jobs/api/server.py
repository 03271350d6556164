"""The server's process: listen, serve, and leave in good order."""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ...storage.ledger import Ledger
from ..batches.keeper import BatchKeeper
from ..client import Client
from ..errors import JobError
from ..periodic import Periodic
from ..settings import Settings
from ..webhooks import SEND_SECONDS, WebhookSender
from .app import create_app
from .models import ServedModels

# Requests under way when told to stop. Docker kills after ten seconds.
_GRACE_SECONDS = 8
# Those of them that are told that the server stops.
_TOLD_AFTER_SECONDS = 5
_BACKLOG = 2048


class ListenError(JobError):
    """The address can not be listened on."""


class AnonymousError(JobError):
    """Others could connect, and no API key keeps them out."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the address; of a name that is known of `localhost` alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_anonymous(ledger: Ledger, host: str) -> None:
    """Raises `AnonymousError` where everybody on the network would be let in."""
    if not is_loopback(host) and ledger.api_keys.count() == 0:
        raise AnonymousError(
            f"others can connect to {host} and there is no API key: make one with `headrace keys create`, "
            "or let everybody in with --allow-anonymous"
        )


def serve(settings: Settings, models: ServedModels, host: str, port: int, on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread. Port 0 picks a free one.

    `on_listening` is told the URL once connections are taken. Raises `ListenError`, or what `Client` raises.
    """
    with _listen(host, port) as listener, Client(settings) as client:
        app = create_app(client, models)
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = Server(config, app.state.stopping)
        webhooks = WebhookSender.of(client.ledger, settings)
        with (
            Periodic("webhooks", SEND_SECONDS, webhooks.send_due),
            BatchKeeper.of(client, models),
            _stopping_on_signals(server),
        ):
            on_listening(_url(host, listener))
            server.run(sockets=[listener])


class Server(uvicorn.Server):
    """Sets `stopping` some seconds after it was told to stop: what is still being answered then has to end."""

    def __init__(
        self, config: uvicorn.Config, stopping: asyncio.Event, told_after_seconds: float = _TOLD_AFTER_SECONDS
    ) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._told_after_seconds = told_after_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._told_after_seconds, self._stopping.set)
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host} port {port}: {reason}; choose with --host and --port") from error
    # Connections inherit it. asyncio sets it only where the socket names its protocol, and without it an answer of
    # two writes, or a token behind another, waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


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
