"""The server's process: listen, serve, and leave in good order."""

import asyncio
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ...storage.errors import Argument
from ...storage.ledger.ledger import Ledger
from ..batches.keeper import BatchKeeper
from ..broker.redis_access import check_access
from ..client.client import Client
from ..errors import JobError, SpecError
from ..outside.webhooks import SEND_SECONDS, WebhookSender
from ..periodic import Periodic
from ..settings import Settings
from .app import Beside, create_app
from .body_limit import MAX_LIVE_BYTES
from .http_protocol import BoundedHttpProtocol
from .models import ServedModels

# Requests under way when told to stop. Docker kills after ten seconds.
_GRACE_SECONDS = 8
# Those of them that are told that the server stops.
_TOLD_AFTER_SECONDS = 5
_BACKLOG = 2048
# What uvicorn's newer WebSockets say, as an error, of each that was refused with an answer of its own, such as 404.
_TAKEN_FOR_NO_ANSWER = "ASGI callable returned without completing handshake."


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


def serve(
    settings: Settings,
    models: ServedModels,
    host: str,
    port: int,
    on_listening: Callable[[str], None],
    grpc_port: int | None = None,
    allow_anonymous: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread. Port 0 picks a free one.

    `on_listening` is told the URL once connections are taken, and then that of gRPC, if it is wanted. The process may
    have as many files open from now on as it can. Raises `ListenError`, what `Client` raises, `SpecError` where
    gRPC is wanted and not installed, and `SettingsError` for a Redis that refuses its user. Without `allow_anonymous`,
    and while there is no API key, it is to be called by an IP address or as localhost.
    """
    if settings.redis_url is not None:
        check_access(settings.redis_url)
    _allow_many_connections()
    logging.getLogger("uvicorn.error").addFilter(_is_worth_saying)
    with _listen(host, port) as listener, Client(settings) as client:
        beside = nullcontext if grpc_port is None else _grpc(settings, host, grpc_port, on_listening)
        app = create_app(client, models, beside, local_names_only=not allow_anonymous)
        server = Server(http_config(app), app.state.stopping, on_leaving=app.state.leaving.set)
        webhooks = WebhookSender.of(client.ledger, settings)
        with (
            Periodic("webhooks", SEND_SECONDS, webhooks.send_due, webhooks.stop),
            BatchKeeper.of(client, models),
            _stopping_on_signals(server),
        ):
            on_listening(_url(host, listener))
            server.run(sockets=[listener])


def http_config(app: FastAPI) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return record.msg != _TAKEN_FOR_NO_ANSWER


def _allow_many_connections() -> None:
    """Each reader of a stream is an open file, and shells start their programs with room for a thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where the limit is none, as on macOS, the system has one of its own that may not be asked for.
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _grpc(settings: Settings, host: str, port: int, on_listening: Callable[[str], None]) -> Beside:
    """The gRPC server to be. Raises `SpecError` where the extra is missing, `ListenError`."""
    try:
        # Here, not above: it is an extra.
        from ..grpc.server import grpc_server
    except ImportError as error:
        problem = f": {error.name} is missing: install headrace with its grpc extra"
        raise SpecError(Argument("grpc_port"), problem) from error
    # gRPC itself says too late, and to the log, that an address is taken.
    with _listen(host, port, "--grpc-port") as found:
        address = _address(host, found)
    return partial(
        grpc_server,
        address=address,
        max_request_bytes=min(settings.max_body_bytes, MAX_LIVE_BYTES),
        grace_seconds=_GRACE_SECONDS,
        on_listening=lambda: on_listening(f"grpc://{address}"),
    )


class Server(uvicorn.Server):
    """Sets `stopping` some seconds after it was told to stop: what is still being answered then has to end.

    `on_leaving` is called as soon as it was.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: asyncio.Event,
        told_after_seconds: float = _TOLD_AFTER_SECONDS,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._told_after_seconds = told_after_seconds
        self._on_leaving = on_leaving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_leaving()
        asyncio.get_running_loop().call_later(self._told_after_seconds, self._stopping.set)
        await super().shutdown(sockets)


def _listen(host: str, port: int, option: str = "--port") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        # Python repeats the address.
        reason, _, _ = str(getattr(error, "strerror", None) or error).partition(" (while attempting")
        raise ListenError(f"cannot listen on {host} port {port}: {reason}; choose with --host and {option}") from error
    # Connections inherit it. asyncio sets it only where the socket names its protocol, and without it an answer of
    # two writes, or a token behind another, waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(host: str, listener: socket.socket) -> str:
    return f"http://{_address(host, listener)}"


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
