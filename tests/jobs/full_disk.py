"""A Valkey that cannot save its data: it answers what is read, and refuses whatever writes (MISCONF)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis

from headrace.jobs.embedded.valkey import EmbeddedValkey, ValkeyPaths


@contextmanager
def full_disk(data_dir: Path, wait_until: Callable[..., None]) -> Iterator[None]:
    """While the context lasts the embedded server over `data_dir`, which somebody has to use, takes nothing in."""
    # What a full disk does to a snapshot, a folder in its place does too.
    in_the_way = ValkeyPaths.of(data_dir).folder / "dump.rdb"
    with EmbeddedValkey(data_dir) as valkey, Redis.from_url(valkey.url, decode_responses=True) as redis:
        in_the_way.mkdir()
        redis.config_set("save", "3600 1000000")
        _save(redis, "err", wait_until)
        try:
            yield
        finally:
            in_the_way.rmdir()
            _save(redis, "ok", wait_until)


def _save(redis: Redis, status: str, wait_until: Callable[..., None]) -> None:
    redis.bgsave()
    wait_until(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == status, f"saving has ended: {status}")
