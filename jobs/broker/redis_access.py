"""Which Redis there is, how it is asked, and whether it lets us in: what no waiting cures is found out at the start."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from ..embedded.valkey import EmbeddedValkey
from ..settings import Settings, SettingsError

_SECONDS = 2.0
_NO_SUCH_DATABASE = "DB index is out of range"


@dataclass(frozen=True)
class RedisServer:
    """`url`: as redis-py reads it. `ensure` starts the embedded one again if it is gone."""

    url: str
    ensure: Callable[[], None]


@contextmanager
def redis_server(settings: Settings) -> Iterator[RedisServer]:
    """Use the configured Redis, or the embedded Valkey for as long as the context lasts.

    Raises EmbeddedValkeyError, SettingsError; a configured server is not contacted here.
    """
    if settings.redis_url is not None:
        _check_url(settings.redis_url)
        yield RedisServer(settings.redis_url, lambda: None)
        return
    with EmbeddedValkey(settings.data_dir) as valkey:
        yield RedisServer(valkey.url, valkey.ensure)


def text_client(redis_url: str, seconds: float = 5.0) -> Redis:
    """A client whose answers are texts; waits for so long for one, and for the connection."""
    return Redis.from_url(redis_url, decode_responses=True, socket_timeout=seconds, socket_connect_timeout=seconds)


def server_time(redis: Redis) -> float:
    """Seconds since the epoch by the server's clock, the one that all hosts share. Raises redis' errors."""
    seconds, microseconds = redis.time()
    return float(seconds) + float(microseconds) / 1e6


def _check_url(redis_url: str) -> None:
    """Raises `SettingsError` for a URL with an option that no connection takes. Contacts nobody."""
    try:
        with Redis.from_url(redis_url) as redis:
            redis.connection_pool.make_connection()
    except (TypeError, ValueError) as error:
        problem = f"HEADRACE_REDIS_URL has an option that connections do not have, or not so: {error}"
        raise SettingsError(problem) from error


def check_access(redis_url: str) -> None:
    """Raises `SettingsError` when Redis refuses the user or the database of the URL.

    A server that does not answer, or cannot serve anyone just now, is no error: workers wait for it.
    """
    at_once = Retry(NoBackoff(), 0)
    timeouts = {"socket_timeout": _SECONDS, "socket_connect_timeout": _SECONDS}
    with Redis.from_url(redis_url, retry=at_once, **timeouts) as redis:
        try:
            redis.ping()
        except RedisError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error


def trouble_of(error: RedisError) -> str:
    """What is said of a Redis that keeps a job waiting."""
    if isinstance(error, OutOfMemoryError):
        return f"Redis is full: make room in it, or raise its maxmemory ({error})"
    if isinstance(error, ResponseError):
        return f"Redis takes nothing in ({error})"
    return f"Redis does not answer ({error})"


def refusal(error: Exception) -> SettingsError | None:
    """What is to be said of an error by which Redis refuses the user or the database of the URL; None of any other."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return SettingsError(f"HEADRACE_REDIS_URL: Redis refuses its user or password: {error}")
    if _NO_SUCH_DATABASE in str(error):
        return SettingsError(f"HEADRACE_REDIS_URL: Redis has no such database: {error}")
    return None
