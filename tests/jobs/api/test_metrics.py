"""`/metrics` as Prometheus reads it."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from headrace.jobs.api.app import create_app
from headrace.jobs.api.latencies import Latencies
from headrace.jobs.api.models import ServedModels
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.streams.events import StreamEvent
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobState, NewJob, NewPart, NewShard

from ...storage.ledger.claiming import take_shard
from ..conftest import wait_until
from ..running import MODEL, environment
from .conftest import ApiServer

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """The sum of the samples that have these labels; None without any."""
    found = [v for (n, own), v in samples.items() if n == name and set(labels.items()) <= own]
    return sum(found) if found else None


def test_metrics_of_a_running_server(api: ApiServer, wait_until_done: Callable[[str], dict[str, Any]]) -> None:
    queue = shard_queue(str(MODEL), Precision())
    before = scrape(api.http.get("/metrics").text)
    rows = [{"text": f"parcel {number}"} for number in range(5)]
    job = api.post("/jobs", model=api.model, rows=rows, prompt="{text}", choices=["a", "b"])
    prompt_tokens = wait_until_done(job["id"])["tokens"]["prompt"]
    api.http.get("/jobs/job_none")

    answers: list[httpx2.Response] = []

    def tells_of_the_engine() -> bool:
        answers.append(api.http.get("/metrics"))
        return (value(scrape(answers[-1].text), "headrace_engine_steps_total", queue=queue) or 0) > 0

    # A worker that stands still for some seconds is none for so long.
    wait_until(tells_of_the_engine, "the worker has told of its engine, as it does every second")
    response = answers[-1]
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = scrape(response.text)

    def grown(name: str, **labels: str) -> float:
        return (value(after, name, **labels) or 0) - (value(before, name, **labels) or 0)

    # Other tests' jobs may have run meanwhile.
    assert grown("headrace_rows_total", outcome="answered") >= 5
    assert grown("headrace_tokens_total", kind="prompt") >= prompt_tokens
    assert grown("headrace_jobs", state="completed") >= 1
    assert grown("headrace_http_requests_total", route="/jobs", status="201", method="POST") == 1
    assert grown("headrace_http_requests_total", route="/jobs/{job_id}", status="404") == 1
    assert grown("headrace_http_request_seconds_count", route="/jobs", method="POST") == 1
    assert value(after, "headrace_workers", queue=queue) == 1
    assert value(after, "headrace_ledger_up") == value(after, "headrace_redis_up") == 1
    assert 0 <= (value(after, "headrace_engine_kv_usage", queue=queue) or 0) <= 1
    assert value(after, "headrace_engine_spec_decode_draft_tokens_total", queue=queue) == 0
    assert value(after, "headrace_live_requests_waiting") == 0
    # Prometheus' own of a counter's birth are told of nowhere.
    exported = {name for name in re.findall(r"^# TYPE (\S+)", response.text, re.M) if not name.endswith("_created")}
    assert exported == documented()


def documented() -> set[str]:
    """The metrics that the table in `deploy/metrics` explains."""
    lines = Path(__file__).parents[3].joinpath("deploy", "metrics", "README.md").read_text().splitlines()
    names = [line.split("|")[1] for line in lines if line.startswith("| `headrace_")]
    return set(re.findall(r"headrace_\w+", " ".join(names)))


def test_how_long_live_answers_take(api: ApiServer, openai_client: OpenAI) -> None:
    """Each answer's first token is noted, streamed or not, and each request's end."""
    names = ("time_to_first_token", "e2e_request_latency")

    def counts() -> list[float]:
        samples = scrape(api.http.get("/metrics").text)
        own = {"model_name": api.model}
        return [value(samples, f"headrace_{name}_seconds_count", **own) or 0 for name in names]

    before = counts()
    options: dict[str, Any] = {"model": api.model, "prompt": "parcel", "max_tokens": 6, "n": 2, "temperature": 1.0}
    openai_client.completions.create(**options)
    for _ in openai_client.completions.create(**options, stream=True):
        pass
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [4, 2]
    with pytest.raises(BadRequestError):
        openai_client.completions.create(**options | {"n": 0})
    assert counts()[1] == before[1] + 2


def test_tokens_that_come_together_share_their_time() -> None:
    latencies = Latencies()
    timer = latencies.timer("m", time.perf_counter())
    for choice, event in (
        (0, StreamEvent(1, (7, 7), ("a", "b"))),
        (1, StreamEvent(1, (7,), ("a",))),
        (0, StreamEvent(3, (7, 7, 7), ("c", "d", "e"))),
        (0, StreamEvent(6, finish_reason="stop")),
    ):
        timer.note(choice, event)
    counts = {s.name: s.value for family in latencies.collect() for s in family.samples if s.name.endswith("_count")}
    assert counts == {
        "headrace_time_to_first_token_seconds_count": 2,
        "headrace_inter_token_latency_seconds_count": 3,
        "headrace_e2e_request_latency_seconds_count": 0,
    }


def test_paths_of_clients_own_invention_make_no_metrics(api: ApiServer) -> None:
    for number in range(3):
        api.http.get(f"/invented/{number}")
        api.http.request(f"INVENTED{number}", "/jobs")
    text = api.http.get("/metrics").text
    assert "invented" not in text.lower()


@pytest.fixture
def client(tmp_path: Any) -> Any:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        yield client


def test_what_waits_is_shown_for_autoscaling(client: Client) -> None:
    ledger = client.ledger
    for number, queue in enumerate(["a", "a", "b"]):
        job = NewJob(f"job_{number}", queue, "/m", "/o", "f", 20, {"model": "/m"})
        ledger.create_job(job, [NewShard(0, 12, "/s"), NewShard(1, 8, "/s")])
    claim = take_shard(ledger, "job_0/00000", "owner", 60)
    assert claim is not None
    ledger.pause_job("job_2")
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        samples = scrape(http.get("/metrics").text)
        assert value(samples, "headrace_queue_shards", queue="a", state="queued") == 3
        assert value(samples, "headrace_queue_shards", queue="a", state="running") == 1
        assert value(samples, "headrace_queue_rows", queue="a") == 28
        assert (value(samples, "headrace_queue_oldest_seconds", queue="a") or 0) > 0
        assert value(samples, "headrace_queue_shards", queue="b") == 0
        assert value(samples, "headrace_jobs", state="running") == 2
        assert value(samples, "headrace_rows_total") == 0
        ledger.leases.commit_part(claim, NewPart("part", 12, 2, 120, 60, 24))
        samples = scrape(http.get("/metrics").text)
        assert value(samples, "headrace_rows_total", outcome="failed") == 2
        ledger.delete_job("job_0")
        # A counter never falls.
        samples = scrape(http.get("/metrics").text)
        assert value(samples, "headrace_rows_total", outcome="answered") == 10
        assert value(samples, "headrace_tokens_total", kind="cached") == 60


def test_rows_count_from_the_server_s_start(client: Client) -> None:
    """Not from the first scrape, which may come much later."""
    client.ledger.create_job(NewJob("job_0", "a", "/m", "/o", "f", 20, {"model": "/m"}), [NewShard(0, 20, "/s")])
    claim = take_shard(client.ledger, "job_0/00000", "owner", 60)
    assert claim is not None
    client.ledger.leases.commit_part(claim, NewPart("before", 12, 2, 120, 60, 24))
    with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
        client.ledger.leases.commit_part(claim, NewPart("part", 8, 1, 80, 40, 16))
        samples = scrape(http.get("/metrics").text)
    assert value(samples, "headrace_rows_total", outcome="answered") == 7


def test_without_its_ledger_it_says_so(client: Client, tmp_path: Any) -> None:
    working = client.ledger
    client.ledger = Ledger(f"postgresql+psycopg://nobody@/none?host={tmp_path}")
    try:
        with TestClient(create_app(client, ServedModels.of([str(MODEL)]))) as http:
            samples = scrape(http.get("/metrics").text)
        assert (value(samples, "headrace_ledger_up"), value(samples, "headrace_redis_up")) == (0, 1)
    finally:
        client.ledger.close()
        client.ledger = working


def test_the_rate_is_that_of_the_last_minute(client: Client) -> None:
    ledger, overview = client.ledger, client.ledger.overview
    ledger.create_job(NewJob("job_1", "q", "/m", "/o", "f", 100, {"model": "/m"}), [NewShard(0, 100, "/s")])
    assert overview.recent_rows_per_second("job_1") is None
    claim = take_shard(ledger, "job_1/00000", "owner", 60)
    assert claim is not None
    ledger.leases.commit_part(claim, NewPart("part-1", 30))
    ledger.leases.commit_part(claim, NewPart("part-2", 60))
    _long_ago(ledger, "update jobs set started_at = started_at - 1000")
    _long_ago(ledger, "update parts set committed_at = committed_at - 500 where file_name = 'part-1'")
    assert overview.recent_rows_per_second("job_1") == pytest.approx(1.0)
    assert [job.id for job in overview.page("default", 10, state=JobState.RUNNING)] == ["job_1"]
    assert overview.page("another", 10) == []


def _long_ago(ledger: Ledger, statement: str) -> None:
    with ledger.database.write() as connection:
        connection.exec_driver_sql(statement)
