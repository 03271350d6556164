"""One Valkey for all tests of the streams; after each one, no key may be left that would stay for ever."""

from collections.abc import Iterator

import pytest
from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.streams.publisher import StreamPublisher


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedValkey(tmp_path_factory.mktemp("streams")) as valkey:
        yield valkey.url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    """An empty one."""
    with Redis.from_url(url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture(autouse=True)
def no_key_stays(redis: Redis) -> Iterator[None]:
    yield
    assert [key for key in redis.scan_iter() if redis.ttl(key) < 0] == []


@pytest.fixture
def publisher(url: str, redis: Redis) -> Iterator[StreamPublisher]:
    with StreamPublisher(url, 60) as publisher:
        yield publisher
        assert publisher.flush(30)
