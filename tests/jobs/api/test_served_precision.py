"""`headrace serve` with a precision: requests that name none go to workers that were started with it."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from headrace.engine.errors import ConfigError
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.broker.celery_app import live_queue, shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequests
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

from ..running import MODEL, environment

PRECISION = Precision("float32", "int8", "fp8")
CHAT: dict[str, Any] = {"model": MODEL.name, "messages": [{"role": "user", "content": "x"}]}
JOB: dict[str, Any] = {"model": MODEL.name, "rows": [{"text": "x"}], "prompt": "{text}"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path_factory.mktemp("data")))) as client:
        yield client


@pytest.fixture(scope="module")
def http(client: Client) -> Iterator[TestClient]:
    with TestClient(create_app(client, ServedModels.of([str(MODEL)], PRECISION))) as http:
        yield http


@pytest.mark.usefixtures("lasting_presence")
def test_live_requests(client: Client, http: TestClient) -> None:
    refused = http.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503
    assert "--dtype float32 --quantization int8 --kv-cache-dtype fp8`" in refused.json()["error"]["message"]
    queue = live_queue(str(MODEL), PRECISION)
    with WorkerPresence(client.redis_url) as presence, LiveRequests(client.redis_url, client.celery) as requests:
        presence.announce(shard_queue(str(MODEL), PRECISION), WorkerId.own())
        http.app.state.stopping.set()  # type: ignore[attr-defined]
        assert http.post("/v1/chat/completions", json=CHAT).json()["error"]["code"] == "server_stops"
        assert requests.num_unanswered(queue) == 1


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, PRECISION),
        ({"dtype": "bfloat16"}, Precision("bfloat16")),
        ({"quantization": "int8"}, Precision(quantization="int8")),
        ({"kv_cache_dtype": "fp8_e5m2"}, Precision(kv_cache_dtype="fp8_e5m2")),
    ],
    ids=["none", "dtype", "quantization", "kv_cache_dtype"],
)
def test_jobs(client: Client, http: TestClient, named: dict[str, str], expected: Precision) -> None:
    job = http.post("/jobs", json=JOB | named).raise_for_status().json()
    assert tuple(job[name] for name in Precision._fields) == expected
    assert client.ledger.job(job["id"]).queue == shard_queue(str(MODEL), expected)


def test_the_list_of_models_says_so(http: TestClient) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert tuple(model[name] for name in Precision._fields) == PRECISION


@pytest.mark.parametrize(
    "precision", [Precision("float13"), Precision(quantization="int3"), Precision(kv_cache_dtype="fp7")], ids=str
)
def test_what_no_worker_knows_is_refused(precision: Precision) -> None:
    with pytest.raises(ConfigError):
        ServedModels.of([str(MODEL)], precision)
