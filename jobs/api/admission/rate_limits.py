"""What tenants use of their limits, counted in Redis by its own clock.

Requests a minute: a token bucket (in the form of GCRA), so that a minute's worth may come at once and then as many as
the rate gives. Tokens of live requests: an entry each, which its owner renews; what a killed process held runs out.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from redis.exceptions import RedisError

from ...broker.redis_access import text_client

ENTRY_SECONDS = 15.0
_NO_LIMIT = -1

# The bucket's one number is the time, in microseconds, at which it is full again (the theoretical arrival time).
# Entries are `<id>|<tokens>` by when they run out; the sum is kept beside them so that admitting stays cheap.
_ADMIT = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local per_minute, most_tokens = tonumber(ARGV[1]), tonumber(ARGV[2])
local others, tokens, entry, entry_us = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])

local held = tonumber(redis.call('GET', KEYS[3]) or '0')
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], gone)
  held = redis.call('DECRBY', KEYS[3], gone:match('|(%d+)$'))
end

local interval, full_at, wait = 0, now, 0
if per_minute == 0 then
  wait = 60000000
elseif per_minute > 0 then
  interval = math.max(1, math.floor(60000000 / per_minute))
  -- Never emptier than empty, or a clock that was set back would keep the tenant out until it is where it was.
  full_at = math.min(tonumber(redis.call('GET', KEYS[1]) or '0'), now + interval * per_minute)
  full_at = math.max(now, full_at) + interval
  wait = full_at - now - interval * per_minute
  if wait > 0 then full_at = full_at - interval end
end
local refused = 0
if wait > 0 then refused = 1
elseif most_tokens >= 0 and held + others + tokens > most_tokens then
  refused = 2
  full_at = full_at - interval
else
  if per_minute > 0 then
    redis.call('SET', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000) + 1)
  end
  if entry ~= '' and most_tokens >= 0 then
    redis.call('ZADD', KEYS[2], string.format('%.0f', now + entry_us), entry .. '|' .. ARGV[4])
    held = redis.call('INCRBY', KEYS[3], tokens)
    -- Together, and after the last entry has run out: a sum never outlives what it sums up, nor the other way round.
    redis.call('PEXPIRE', KEYS[2], math.ceil(entry_us / 500))
    redis.call('PEXPIRE', KEYS[3], math.ceil(entry_us / 500))
  end
end
local left = 0
if per_minute > 0 then left = math.floor((now + interval * per_minute - full_at) / interval) end
return {refused, math.max(0, wait), math.max(0, left), math.max(0, full_at - now), held}
"""

# What is missing, because Redis was wiped or its owner stood still, counts again.
_RENEW = """
local time = redis.call('TIME')
local ends = string.format('%.0f', time[1] * 1000000 + time[2] + tonumber(ARGV[1]))
for i = 2, #ARGV do
  if redis.call('ZADD', KEYS[1], ends, ARGV[i]) == 1 then
    redis.call('INCRBY', KEYS[2], ARGV[i]:match('|(%d+)$'))
  end
end
redis.call('PEXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1]) / 500))
redis.call('PEXPIRE', KEYS[2], math.ceil(tonumber(ARGV[1]) / 500))
"""

_RELEASE = """
for i = 1, #ARGV do
  if redis.call('ZREM', KEYS[1], ARGV[i]) == 1 then
    redis.call('DECRBY', KEYS[2], ARGV[i]:match('|(%d+)$'))
  end
end
"""


@dataclass(frozen=True)
class Usage:
    """What one request met. `refused_by`: "requests", "tokens" or None; times in seconds.

    `retry_after`: when the next request may come; `reset`: when the whole minute's requests are there again.
    `held_tokens`: those of the tenant's open live requests.
    """

    refused_by: str | None
    retry_after: float
    remaining_requests: int
    reset: float
    held_tokens: int


@dataclass(frozen=True)
class Hold:
    """Tokens that count until `RateLimits.release`, or until the process that took them is gone."""

    tenant: str
    entry: str


class RateLimits:
    """Limits of tenants, the same for all processes that share the Redis. Thread-safe; a context manager.

    `entry_seconds`: how long what a killed process held goes on counting.
    """

    def __init__(self, redis_url: str, entry_seconds: float = ENTRY_SECONDS) -> None:
        self._redis = text_client(redis_url)
        self._entry_us = int(entry_seconds * 1e6)
        self._admit = self._redis.register_script(_ADMIT)
        self._renew = self._redis.register_script(_RENEW)
        self._release = self._redis.register_script(_RELEASE)
        self._holds: set[Hold] = set()
        self._released: deque[Hold] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._wake:
            self._stopping = True
            self._released.extend(self._holds)
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._redis.close()

    def admit(
        self,
        tenant: str,
        requests_per_minute: int | None,
        queued_tokens: int | None = None,
        other_tokens: int = 0,
        num_tokens: int = 0,
        request_id: str = "",
    ) -> tuple[Usage, Hold | None]:
        """Count a request, and its tokens if it names itself and there is a limit; one that is refused counts nowhere.

        `other_tokens` of the tenant count too, but are kept elsewhere. Raises redis' errors.
        """
        most_tokens = _NO_LIMIT if queued_tokens is None else queued_tokens
        answer: Any = self._admit(
            keys=[_key("requests", tenant), _key("entries", tenant), _key("tokens", tenant)],
            args=[
                _NO_LIMIT if requests_per_minute is None else requests_per_minute,
                most_tokens,
                other_tokens,
                num_tokens,
                request_id,
                self._entry_us,
            ],
        )
        refused, wait, left, reset, held = map(int, answer)
        usage = Usage((None, "requests", "tokens")[refused], wait / 1e6, left, reset / 1e6, held)
        if refused or not request_id or queued_tokens is None:
            return usage, None
        return usage, self._hold(Hold(tenant, f"{request_id}|{num_tokens}"))

    def release(self, hold: Hold) -> None:
        """Have the tokens count no longer. Neither waits nor raises; may be repeated."""
        with self._wake:
            if hold in self._holds:
                self._holds.discard(hold)
                self._released.append(hold)
                self._wake.notify()

    def held_tokens(self, tenant: str) -> int:
        """Tokens of the tenant's open live requests. Raises redis' errors."""
        usage, _ = self.admit(tenant, None)
        return usage.held_tokens

    def _hold(self, hold: Hold) -> Hold:
        with self._wake:
            self._holds.add(hold)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rate limits", daemon=True)
                self._thread.start()
        return hold

    def _run(self) -> None:
        renew_at = time.monotonic()
        while not self._stopping or self._released:
            with self._wake:
                seconds = renew_at - time.monotonic()
                self._wake.wait_for(lambda: self._released or self._stopping, max(0.0, seconds))
                released, held = list(self._released), list(self._holds)
                self._released.clear()
            # What can not be told now runs out by itself, or is renewed the next time.
            with suppress(RedisError):
                self._tell(self._release, released, [])
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + self._entry_us / 3e6
                with suppress(RedisError):
                    self._tell(self._renew, held, [self._entry_us])

    def _tell(self, script: Any, holds: list[Hold], first: list[int]) -> None:
        for tenant in {hold.tenant for hold in holds}:
            entries = [hold.entry for hold in holds if hold.tenant == tenant]
            script(keys=[_key("entries", tenant), _key("tokens", tenant)], args=[*first, *entries])


def _key(kind: str, tenant: str) -> str:
    return f"headrace:limits:{kind}:{tenant}"
