"""`Client.generate` where nobody serves the model: with a worker of its own."""

from pathlib import Path

import pytest
from redis import Redis

from headrace.jobs.client.client import Client
from headrace.jobs.errors import WorkerFailedError

from ..models import write_model_folder
from ..running import MODEL, processes_of


def logs(client: Client) -> list[Path]:
    return list((client.settings.data_dir / "logs").glob("*"))


def test_an_answer_leaves_nothing_of_its_worker(unserved: Client) -> None:
    before = processes_of(unserved.settings.data_dir)
    assert unserved.generate("Where is my parcel?", MODEL, max_tokens=2).text
    assert logs(unserved) == []
    assert processes_of(unserved.settings.data_dir) == before
    with Redis.from_url(unserved.redis_url, decode_responses=True) as redis:
        # The answer itself can be read again for a while.
        lasting = [key for key in redis.scan_iter() if redis.ttl(key) < 0]
        assert [key for key in lasting if not key.startswith("_kombu.")] == []


def test_of_a_worker_that_failed_its_words_stay(unserved: Client, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"the worker refused to start: .*weights"):
        unserved.generate("a b", write_model_folder(tmp_path / "without weights"), max_tokens=2)
    [log] = logs(unserved)
    assert "weights" in log.read_text()
