"""A client of streaming answers that takes little time itself: raw sockets, and nothing is parsed before the end."""

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_EVENT = re.compile(rb"data: (\{[^\n]*\})\n\n")
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Streamed:
    """One answer. `start`: when it was asked for; `arrivals`: when each chunk with text came, as `perf_counter` says.

    `num_tokens`: as the answer's usage has it.
    """

    start: float
    arrivals: tuple[float, ...]
    end: float
    text: str
    num_tokens: int

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def total(self) -> float:
        return self.end - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class _Answer(asyncio.Protocol):
    """Keeps what comes, and when."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.times: list[float] = []
        self.sizes: list[int] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.body += data
        self.sizes.append(len(self.body))
        if self.body.endswith(_LAST_CHUNK) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the server closed: {bytes(self.body[:500])!r}"))


async def stream_all(url: str, key: str, bodies: Sequence[dict[str, Any]]) -> list[Streamed]:
    """All answers at once, each over a connection of its own that is open before it is asked for."""
    opened = [await _connect(url) for _ in bodies]
    waiting = [_ask(url, key, body, *connection) for body, connection in zip(bodies, opened, strict=True)]
    return list(await asyncio.gather(*waiting))


async def stream_one(url: str, key: str, body: dict[str, Any]) -> Streamed:
    return (await stream_all(url, key, [body]))[0]


async def _connect(url: str) -> tuple[asyncio.Transport, _Answer]:
    where = urlsplit(url)
    return await asyncio.get_running_loop().create_connection(_Answer, where.hostname or "localhost", where.port or 80)


async def _ask(url: str, key: str, body: dict[str, Any], transport: asyncio.Transport, answer: _Answer) -> Streamed:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    start = time.perf_counter()
    transport.write(head.encode() + data)
    try:
        await answer.done
    finally:
        transport.close()
    return _read(answer, start)


def _read(answer: _Answer, start: float) -> Streamed:
    arrivals: list[float] = []
    texts: list[str] = []
    num_tokens = 0
    for found in _EVENT.finditer(answer.body):
        chunk = json.loads(found[1])
        if "error" in chunk:
            raise RuntimeError(f"the server answers {chunk['error']}")
        num_tokens = (chunk["usage"] or {}).get("completion_tokens", 0)
        text = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
        if text:
            texts.append(text)
            arrivals.append(answer.times[bisect_left(answer.sizes, found.end())])
    if not arrivals:
        raise RuntimeError(f"no answer: {bytes(answer.body[:500])!r}")
    return Streamed(start, tuple(arrivals), answer.times[-1], "".join(texts), num_tokens)
