"""One connection that listens to many channels and comes back by itself."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .connections import Pauses

# A connection that says nothing, not even to a ping, for three of these is taken for dead.
PING_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Subscriber:
    """`on_message` gets every channel's messages, `on_subscribed` a channel each time that listening to it begins.

    What was published before that, or while the connection was away, is lost. For one event loop.
    """

    def __init__(
        self, redis: Redis, on_message: Callable[[str, bytes], None], on_subscribed: Callable[[str], None]
    ) -> None:
        self._redis = redis
        self._on_message, self._on_subscribed = on_message, on_subscribed
        self._channels: set[str] = set()
        # Channels to tell the server about: whether we listen to each from now on.
        self._changes: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def subscribe(self, channel: str) -> None:
        """Listen to the channel from now on; returns at once."""
        self._channels.add(channel)
        self._change(channel, True)

    def unsubscribe(self, channel: str) -> None:
        """Listen to it no more."""
        self._channels.discard(channel)
        self._change(channel, False)

    async def run(self) -> None:
        """Listen until cancelled."""
        pauses = Pauses()
        while True:
            try:
                await self._listen(pauses)
            except* RedisError as errors:
                if pauses.are_short:
                    _log.warning("token streams wait for Redis: %s", errors.exceptions[0])
            await asyncio.sleep(pauses.next())

    def _change(self, channel: str, listen: bool) -> None:
        self._changes[channel] = listen
        self._changed.set()

    async def _listen(self, pauses: Pauses) -> None:
        # redis-py has no types for what a connection can do.
        pool: Any = self._redis.connection_pool
        connection = pool.make_connection()
        try:
            self._changes = dict.fromkeys(self._channels, True)
            self._changed.set()
            await connection.connect()
            # Both end with the first that fails. No one else sends: a cancelled sender would close the connection.
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(connection))
                tasks.create_task(self._receive(connection, pauses))
        except RedisError as error:
            raise ExceptionGroup("not connected", [error]) from None
        finally:
            await connection.disconnect(nowait=True)

    async def _send(self, connection: AbstractConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                await connection.send_command("PING")
                continue
            self._changed.clear()
            changes, self._changes = self._changes, {}
            for command, listen in (("SUBSCRIBE", True), ("UNSUBSCRIBE", False)):
                if channels := [channel for channel, wanted in changes.items() if wanted is listen]:
                    await connection.send_command(command, *channels)

    async def _receive(self, connection: AbstractConnection, pauses: Pauses) -> None:
        while True:
            message: list[Any] | None = await connection.read_response(timeout=3 * PING_SECONDS)
            pauses.reset()
            if message is None:
                raise RedisTimeoutError("Redis does not answer")
            if message[0] == b"message":
                self._on_message(message[1].decode(), message[2])
            elif message[0] == b"subscribe":
                self._on_subscribed(message[1].decode())
