"""A job that cannot go on says why wherever one looks: over HTTP, in `show`, and in both kinds of `watch`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.jobs.client import display
from headrace.jobs.client.display import Pace, RunDisplay
from headrace.storage.ledger.ledger import Ledger

from ..running import Result
from ..shop import Shop, shard_runner
from .own_server import Server

REASON = "cannot read the spooled shard"


@pytest.fixture
def ledger(server: Server) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{server.data_dir / 'headrace.db'}")
    yield opened
    opened.close()


@pytest.fixture
def job_id(server: Server, ledger: Ledger, shop: Shop) -> str:
    """A job whose spool was gone when its turn came."""
    job = ledger.job(server.submit().json()["id"])
    (shard,) = ledger.shards(job.id)
    Path(shard.spool_path).unlink()
    # Before those that other tests have left.
    ledger.set_priority(job.id, 1000)
    shard_runner(replace(shop.tools, ledger=ledger), job.queue, "worker").run(shard.id)
    return job.id


def _fields(result: Result) -> list[list[str]]:
    return [line.split(maxsplit=1) for line in result.out.splitlines()]


def _shown(ledger: Ledger, job_id: str, capfd: pytest.CaptureFixture[str]) -> str:
    progress = ledger.progress(job_id)
    with RunDisplay(Pace(progress)) as bar:
        bar.show(progress)
    return capfd.readouterr().err


def test_everywhere(
    server: Server,
    ledger: Ledger,
    job_id: str,
    headrace: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    for state, words in (("running", "waiting: "), ("paused", f"paused: headrace resume {job_id}; failed last: ")):
        job = server.job(job_id)
        assert job["state"] == state
        assert job["error"].startswith(REASON)
        assert ["error", job["error"]] in _fields(headrace(server.data_dir, "show", job_id))
        assert f"{words}{job['error']}" in _shown(ledger, job_id, capfd)
        ledger.pause_job(job_id)
    other = server.submit().json()["id"]
    for each in (job_id, other):
        ledger.cancel_job(each)
    lines = headrace(server.data_dir, "watch", job_id, other).err.splitlines()
    assert [REASON in line for line in lines] == [True, False]
