"""Results in Redis: what is kept comes back, and a Redis that is away is an empty one."""

from collections.abc import Iterator

import pytest
from redis import Redis

from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.settings import Settings
from headrace.storage import result_cache
from headrace.storage.result_cache import ResultCache

from ..jobs.running import environment


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(Settings.from_environment(environment(tmp_path_factory.mktemp("valkey")))) as server:
        yield server.url


def test_what_is_kept_comes_back_for_a_while(redis_url, monkeypatch):
    # It is waited for, however busy the machine.
    monkeypatch.setattr(result_cache, "_SOCKET_SECONDS", 60.0)
    values = {str(number): b"\x00%d" % number for number in range(300)}
    with ResultCache(redis_url, ttl_seconds=600) as cache, Redis.from_url(redis_url) as redis:
        cache.put_many(values)
        assert cache.get_many(["none", *values]) == values
        assert all(0 < redis.ttl(key) <= 600 for key in redis.keys("*"))
        assert cache.get_many([]) == {}


def test_without_redis_nothing_is_found_and_nothing_raised():
    with ResultCache("redis://127.0.0.1:1/0", ttl_seconds=600) as cache:
        cache.put_many({"a": b"1"})
        assert cache.get_many(["a"]) == {}
