"""What earlier attempts wrote of a stream, for the attempt that goes on with it."""

import json
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from .connections import Pauses, connect
from .events import RecoveredStream, StreamEvent
from .keys import checked
from .script import RECOVER

# Redis reads them in one go: some 50 ms where each has a few thousand tokens.
_STREAMS_PER_CALL = 8


def recover(
    redis_url: str, ttl_seconds: int, attempts: Mapping[str, int], timeout_seconds: float
) -> dict[str, RecoveredStream]:
    """Claim each stream for its attempt and read it. Raises redis' errors when it does not answer in time."""
    deadline = time.monotonic() + timeout_seconds
    found: dict[str, RecoveredStream] = {}
    with connect(redis_url) as redis:
        for chunk in _chunks(attempts):
            arguments = [value for stream_id, attempt in chunk for value in (checked(stream_id), attempt)]
            answers = _ask(redis, [ttl_seconds, *arguments], deadline)
            for (stream_id, _), answer in zip(chunk, answers, strict=True):
                if answer:
                    found[stream_id] = _recovered(*answer)
    return found


def _chunks(attempts: Mapping[str, int]) -> Iterator[list[tuple[str, int]]]:
    items = iter(attempts.items())
    while chunk := list(islice(items, _STREAMS_PER_CALL)):
        yield chunk


def _ask(redis: Redis, arguments: list[Any], deadline: float) -> list[Any]:
    pauses = Pauses()
    while True:
        try:
            answers: list[Any] = redis.eval(RECOVER, 0, *arguments)
        except RedisError:
            pause = pauses.next()
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
        else:
            return answers


def _recovered(
    tokens: bytes, texts: bytes, logprobs: bytes, prompt_logprobs: bytes, newest: bytes, fields: list[bytes]
) -> RecoveredStream:
    of_tokens, of_prompt = json.loads(logprobs), json.loads(prompt_logprobs)
    end = None
    if newest.endswith(b"-1"):
        values = [field.decode() for field in fields]
        end = StreamEvent.from_entry(newest.decode(), dict(zip(values[::2], values[1::2], strict=True)))
    return RecoveredStream(
        tuple(json.loads(tokens)),
        tuple(json.loads(texts)),
        tuple(of_tokens) if of_tokens else None,
        tuple(of_prompt) if of_prompt else None,
        end,
    )
