"""What is told of a job is of one moment, whatever its workers do while it is looked up."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.service import JobService
from headrace.jobs.cli.json_jobs import json_job
from headrace.jobs.client.client import Client
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import Claim, JobRecord, NewJob, NewPart, NewShard

from ...storage.ledger.claiming import claimed
from ..running import MODEL

Told = dict[str, Any]
Look = Callable[[Client, str], Told]


def over_http(client: Client, job_id: str) -> Told:
    return JobService(client, ServedModels.of([str(MODEL)])).job(job_id).model_dump(mode="json")


def in_a_list(client: Client, job_id: str) -> Told:
    [job] = JobService(client, ServedModels.of([str(MODEL)])).jobs(1, None, None).data
    assert job.id == job_id
    return job.model_dump(mode="json")


def on_the_command_line(client: Client, job_id: str) -> Told:
    return json_job(client.ledger, client.ledger.job(job_id))


def begun(ledger: Ledger, job_id: str) -> Claim:
    """A job of one shard, which a worker has begun a while ago: rows that there were not yet have no rate."""
    ledger.create_job(NewJob(job_id, "q", str(MODEL), "/o", "f", 2, {"model": str(MODEL)}), [NewShard(0, 2, "/s")])
    claim = claimed(ledger, f"{job_id}/00000")
    with ledger.database.write() as connection:
        connection.exec_driver_sql("update jobs set started_at = started_at - 10")
    return claim


def looks(client: Client, look: Look, meanwhile: Callable[[Claim], None]) -> Iterator[Told]:
    """What is told of jobs to which `meanwhile` happens before the first, the second, … statement of a look."""
    engine = client.ledger.database.engine
    for before in count(1):
        claim, statements = begun(client.ledger, f"job_{before}"), count(1)

        def act(*statement: Any, claim: Claim = claim, statements: "count[int]" = statements) -> None:
            if next(statements) == before:  # noqa: B023
                meanwhile(claim)

        event.listen(engine, "before_cursor_execute", act)
        try:
            yield look(client, claim.job_id)
        finally:
            event.remove(engine, "before_cursor_execute", act)
        if next(statements) <= before:
            return


@pytest.fixture
def worker(unserved: Client) -> Iterator[Ledger]:
    """The ledger as a worker has it open."""
    with closing(Ledger(unserved.settings.database_url)) as ledger:
        yield ledger


LOOKS = pytest.mark.parametrize("look", [over_http, in_a_list, on_the_command_line])


@LOOKS
def test_rows_and_their_rate_are_of_one_moment(unserved: Client, worker: Ledger, look: Look) -> None:
    def commit(claim: Claim) -> None:
        worker.leases.commit_part(claim, NewPart("part-1", 2))

    told = list(looks(unserved, look, commit))
    assert [bool(each["rows"]["done"]) for each in told] == [bool(each["rows_per_second"]) for each in told], told
    assert (told[0]["rows"]["done"], told[-1]["rows"]["done"]) == (2, 0)


@LOOKS
def test_the_end_of_a_job_has_its_time(unserved: Client, worker: Ledger, look: Look) -> None:
    def end(claim: Claim) -> None:
        worker.leases.commit_part(claim, NewPart("part-1", 2))
        worker.leases.finish_shard(claim)

    told = list(looks(unserved, look, end))
    have_ended = [each["state"] == "completed" for each in told]
    assert [each["finished_at"] is not None for each in told] == have_ended, told
    assert [each["rows"]["done"] == 2 for each in told] == have_ended, told
    assert have_ended[0]
    assert not have_ended[-1]


class DeletedMeanwhile(JobService):
    """Somebody else deletes each job as soon as it has been looked up."""

    def record(self, job_id: str) -> JobRecord:
        job = super().record(job_id)
        self.client.ledger.delete_job(job_id)
        return job


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/webhooks"),
        ("GET", "/results"),
        ("GET", "/results.parquet"),
        ("POST", "/cancel"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/retry"),
        ("POST", "/priority"),
        ("DELETE", ""),
    ],
)
def test_one_that_is_deleted_meanwhile_is_not_there(unserved: Client, method: str, path: str) -> None:
    models = ServedModels.of([str(MODEL)])
    begun(unserved.ledger, "job_1")
    app = create_app(unserved, models)
    app.state.service = DeletedMeanwhile(unserved, models)
    with TestClient(app) as http:
        answer = http.request(method, f"/jobs/job_1{path}", json={"priority": 1} if path == "/priority" else None)
    # What needs nothing of it but what was found has been in time.
    if answer.status_code != 200:
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "job_not_found"
