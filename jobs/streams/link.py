"""The publisher's connection: one call of the script a flush, its arguments built by hand."""

import hashlib
from collections.abc import Sequence
from typing import Any, Self

from redis.exceptions import NoScriptError, RedisError

from .connections import connect
from .outgoing import Operation
from .script import FLUSH


class FlushLink:
    """Runs the flush script; for one thread at a time. Raises redis' errors, OSError, and connects anew after any."""

    def __init__(self, redis_url: str, ttl_seconds: int) -> None:
        self._client = connect(redis_url)
        # redis-py has no types for what a connection can do.
        self._connection: Any = None
        self._ttl = b"%d" % ttl_seconds
        self._sha = hashlib.sha1(FLUSH.encode(), usedforsecurity=False).hexdigest().encode()

    def run(self, operations: Sequence[Operation]) -> list[tuple[int, str]]:
        """Do all operations; returns the indices of those that were refused, and why (see script.py)."""
        num_arguments = 4 + sum(operation.num_arguments for operation in operations)
        head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n0\r\n$%d\r\n%b\r\n" % (
            num_arguments,
            self._sha,
            len(self._ttl),
            self._ttl,
        )
        command = b"".join([head, *(operation.data for operation in operations)])
        try:
            answer = self._ask_anyhow(command)
        except (RedisError, OSError):
            self.close()
            raise
        return [(number - 1, reason.decode()) for number, reason in zip(answer[::2], answer[1::2], strict=True)]

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        if self._connection is not None:
            self._connection.disconnect()

    def _ask_anyhow(self, command: bytes) -> list[Any]:
        try:
            return self._ask(command)
        except NoScriptError:
            # Redis has been restarted, or this is the first flush.
            connection = self._connect()
            connection.send_command("SCRIPT", "LOAD", FLUSH)
            connection.read_response()
            return self._ask(command)

    def _ask(self, command: bytes) -> list[Any]:
        connection = self._connect()
        connection.send_packed_command([command])
        answer: list[Any] = connection.read_response()
        return answer

    def _connect(self) -> Any:
        # Its commands connect it where need be.
        if self._connection is None:
            self._connection = self._client.connection_pool.get_connection()
        return self._connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
