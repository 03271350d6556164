"""Tokens of long rows outlive their worker: it writes them down while it generates, and the next attempt goes on there.

In Redis, one hash a shard: the field `attempt` is the attempt that may write; each other field has a row's tokens so
far, as `Begun` keeps them, under the row's number (`<row>/<sample>` for further samples; `#<k>` after it where the
log-probabilities of the k likeliest are reported). A row that somebody watches is in its stream too, which is what
readers have seen: where both are there, the stream decides, unless it lacks log-probabilities that are wanted.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from redis.exceptions import RedisError

from ...engine.request import Request
from ...storage.ledger.records import Claim
from ..hosting.engine_host import EngineHost
from ..streams.connections import connect
from ..streams.keys import row_stream_id, stream_key, tokens_key
from ..streams.recovery import recover
from .begun import Begun, bytes_of_token

logger = logging.getLogger(__name__)

# A row that is shorter is generated again sooner than all are written down.
MIN_TOKENS = 64
_RECOVER_SECONDS = 5.0

# ARGV: the attempt, the TTL in seconds, then of each row its field, how many bytes it should have and those that
# follow; with none before them they replace what is there. Answers with the fields that did not have as many, or with
# nothing when a later attempt has claimed the shard.
_SAVE = """
local key, attempt = KEYS[1], ARGV[1]
local writer = redis.call('HGET', key, 'attempt')
if writer and tonumber(writer) > tonumber(attempt) then return false end
if writer ~= attempt then
  redis.call('DEL', key)
  redis.call('HSET', key, 'attempt', attempt)
end
local behind = {}
for at = 3, #ARGV, 3 do
  local known = ARGV[at + 1] ~= '0' and redis.call('HGET', key, ARGV[at]) or ''
  if #known == tonumber(ARGV[at + 1]) then
    redis.call('HSET', key, ARGV[at], known .. ARGV[at + 2])
  else
    behind[#behind + 1] = ARGV[at]
  end
end
redis.call('EXPIRE', key, ARGV[2])
return behind
"""
# ARGV: the attempt and the TTL. Claims the shard and answers with what is there; nothing when it is not to be had.
_CLAIM = """
local writer = redis.call('HGET', KEYS[1], 'attempt')
if writer and tonumber(writer) > tonumber(ARGV[1]) then return {} end
redis.call('HSET', KEYS[1], 'attempt', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGETALL', KEYS[1])
"""
_DROP = "if redis.call('HGET', KEYS[1], 'attempt') == ARGV[1] then return redis.call('DEL', KEYS[1]) end"


@dataclass
class Checkpoint:
    """What one attempt at a shard goes on from and writes down.

    `known`: of rows that earlier attempts have begun, by their names. `num_saved`: how many tokens of a row Redis
    has. `requests`: what the engine has of the shard, by their rows' names.
    """

    claim: Claim
    known: Mapping[str, Begun] = field(default_factory=dict)
    num_saved: dict[str, int] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def key(self) -> str:
        return tokens_key(self.claim.shard_id)

    @property
    def is_empty(self) -> bool:
        """Whether Redis has nothing of the shard, as far as this attempt knows."""
        return not self.num_saved and self.claim.attempt_number == 1

    def news(self, host: EngineHost, min_tokens: int, min_new: int) -> dict[str, Begun]:
        """What Redis lacks of rows with so many tokens, of which so many are new."""
        found = {}
        for name, request in self.requests.items():
            saved, with_logprobs = self.num_saved.get(name, 0), request.params.logprobs is not None
            least = max(min_tokens - saved, min_new)
            token_ids, logprobs = host.tokens_after(request.request_id, saved, least, with_logprobs)
            if token_ids:
                found[name] = Begun(tuple(token_ids), tuple(logprobs))
        return found

    def saved(self, news: Mapping[str, Begun], behind: Collection[str]) -> None:
        """Note that Redis has these, except for rows that it has forgotten: they are written anew."""
        for name, tokens in news.items():
            is_behind = _field(self.requests[name]) in behind
            self.num_saved[name] = 0 if is_behind else self.num_saved.get(name, 0) + len(tokens)


class TokenCheckpoints:
    """One a worker; a context manager. `save` is to be called every few seconds. Thread-safe."""

    def __init__(self, redis_url: str, host: EngineHost, ttl_seconds: int, min_tokens: int = MIN_TOKENS) -> None:
        self._redis_url, self._ttl_seconds = redis_url, ttl_seconds
        self._redis = connect(redis_url)
        self._host = host
        self._min_tokens = min_tokens
        self._kept: list[Checkpoint] = []
        self._lock = threading.Lock()
        self._saving = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()

    def restore(self, claim: Claim, rows: Iterable[int]) -> Checkpoint:
        """What earlier attempts have left of these rows; they can write no more. Where Redis is away: nothing."""
        try:
            saved = self._claim(claim)
            streamed = self._streamed(claim, rows)
        except RedisError as error:
            logger.warning("shard %s begins its open rows anew, Redis does not answer: %s", claim.shard_id, error)
            return Checkpoint(claim)
        known = saved | {name: seen for name, seen in streamed.items() if _decides(seen, saved.get(name, Begun()))}
        num_saved = {name: len(saved[name]) for name in saved if known[name].starts_with(saved[name])}
        return Checkpoint(claim, known, num_saved)

    @contextmanager
    def kept(self, checkpoint: Checkpoint, requests: Iterable[Request]) -> Iterator[None]:
        """While the engine has these requests, the tokens of the long ones are saved, and once more at the end."""
        checkpoint.requests = {_name(each): each for each in requests if self._is_worth_it(each)}
        if not checkpoint.requests:
            yield
            return
        with self._lock:
            self._kept.append(checkpoint)
        try:
            yield
        finally:
            with self._lock:
                self._kept.remove(checkpoint)
            # What the next attempt lacks it generates again.
            with suppress(RedisError):
                self._save([checkpoint], min_new=1)

    def save(self) -> None:
        """Write down what the engine has generated since, in one round trip. Raises redis' errors."""
        with self._lock:
            kept = list(self._kept)
        self._save(kept, self._min_tokens)

    def drop(self, checkpoint: Checkpoint) -> None:
        """The shard is done."""
        if not checkpoint.is_empty:
            with suppress(RedisError):
                self._redis.eval(_DROP, 1, checkpoint.key, checkpoint.claim.attempt_id)

    def _is_worth_it(self, request: Request) -> bool:
        max_tokens = request.params.max_tokens
        # Choices come whole.
        grows = request.params.choices is None or request.params.reasoning
        return grows and (max_tokens is None or max_tokens > self._min_tokens)

    def _save(self, kept: Iterable[Checkpoint], min_new: int) -> None:
        # One at a time: an attempt's last save may come while the others' is under way.
        with self._saving:
            all_news = [(each, each.news(self._host, self._min_tokens, min_new)) for each in kept if not each.is_lost]
            due = [(checkpoint, news) for checkpoint, news in all_news if news]
            if not due:
                return
            with self._redis.pipeline(transaction=False) as pipe:
                for checkpoint, news in due:
                    pipe.eval(_SAVE, 1, checkpoint.key, *self._arguments(checkpoint, news))
                answers = pipe.execute()
            for (checkpoint, news), behind in zip(due, answers, strict=True):
                checkpoint.is_lost = behind is None
                checkpoint.saved(news, [name.decode() for name in behind or ()])

    def _arguments(self, checkpoint: Checkpoint, news: Mapping[str, Begun]) -> list[str | int | bytes]:
        arguments: list[str | int | bytes] = [checkpoint.claim.attempt_id, self._ttl_seconds]
        for name, begun in news.items():
            request = checkpoint.requests[name]
            num_top = request.params.logprobs
            num_bytes = checkpoint.num_saved.get(name, 0) * bytes_of_token(num_top)
            arguments += [_field(request), num_bytes, begun.to_bytes(num_top)]
        return arguments

    def _claim(self, claim: Claim) -> dict[str, Begun]:
        answer = self._redis.eval(_CLAIM, 1, tokens_key(claim.shard_id), claim.attempt_id, self._ttl_seconds)
        pairs = zip(answer[::2], answer[1::2], strict=True)
        return dict(_read(name.decode(), tokens) for name, tokens in pairs if name != b"attempt")

    def _streamed(self, claim: Claim, rows: Iterable[int]) -> dict[str, Begun]:
        """The tokens of those rows that somebody has watched, by their names."""
        streams = {row_stream_id(claim.job_id, row): str(row) for row in rows}
        with self._redis.pipeline(transaction=False) as pipe:
            for stream_id in streams:
                pipe.exists(stream_key(stream_id))
            are_there = pipe.execute()
        attempts = {stream: claim.attempt_id for stream, there in zip(streams, are_there, strict=True) if there}
        found = recover(self._redis_url, self._ttl_seconds, attempts, _RECOVER_SECONDS) if attempts else {}
        # One that ended in an error may be that of a row which is tried again.
        good = {stream: each for stream, each in found.items() if each.end is None or each.end.error is None}
        return {streams[stream_id]: Begun(tuple(each.token_ids)) for stream_id, each in good.items()}


def _decides(seen: Begun, saved: Begun) -> bool:
    """Whether to go on from what a row's readers have seen, rather than from what was saved."""
    return not saved.logprobs and not saved.starts_with(seen)


def _field(request: Request) -> str:
    """Under what Redis has a request's tokens."""
    num_top = request.params.logprobs
    return _name(request) if num_top is None else f"{_name(request)}#{num_top}"


def _read(field: str, tokens: bytes) -> tuple[str, Begun]:
    name, _, num_top = field.partition("#")
    return name, Begun.from_bytes(tokens, int(num_top) if num_top else None)


def _name(request: Request) -> str:
    """A row's, whatever the attempt: requests are named ATTEMPT/ROW or ATTEMPT/ROW/SAMPLE."""
    return request.request_id.partition("/")[2]
