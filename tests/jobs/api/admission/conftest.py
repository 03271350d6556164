"""The API in this process, and what its answers say of keys and limits."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.tables import metadata

from ...running import MODEL, environment

QUEUE = "headrace.live.test"
JOB = {"model": "model", "rows": [{"text": "Where is my parcel?"}], "prompt": "{text}", "choices": ["a", "b"]}
# Prompt and answer tokens of a request to the probe.
COST = 30


def probe(app: FastAPI) -> None:
    """What a route of live requests does, without the request."""

    @app.post("/probe")
    def admit(request: Request) -> dict[str, Any]:
        with app.state.admission.admit_live(request, QUEUE, COST):
            return {"tenant": request.state.tenant}

    @app.post("/open")
    def begin(request: Request) -> None:
        app.state.open = app.state.admission.admit_live(request, QUEUE, COST)


@dataclass
class Desk:
    """The API in this process, without its server."""

    client: Client
    http: TestClient
    app: FastAPI
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        return self.client.ledger

    def key(self, tenant: str) -> dict[str, str]:
        """The headers of a tenant's requests."""
        if tenant not in self.secrets:
            self.secrets[tenant] = self.ledger.api_keys.create(tenant).secret
        return {"Authorization": f"Bearer {self.secrets[tenant]}"}

    def submit(self, tenant: str, **headers: str) -> httpx2.Response:
        return self.http.post("/jobs", json=JOB, headers={**self.key(tenant), **headers})

    def probe(self, tenant: str) -> httpx2.Response:
        return self.http.post("/probe", headers=self.key(tenant))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(tmp_path_factory.mktemp("data")))) as client:
        yield client


@pytest.fixture(scope="module")
def models() -> ServedModels:
    return ServedModels.of([str(MODEL)])


@pytest.fixture
def desk(client: Client, models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """With an empty ledger and nothing remembered."""
    with client.ledger.database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            # Whose ledger it is stays.
            if table.name != "identity":
                connection.execute(table.delete())
    app = create_app(client, models)
    probe(app)
    with TestClient(app) as http:
        yield Desk(client, http, app)


def assert_refused(response: httpx2.Response) -> str:
    assert response.status_code == 401, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    return error["message"]


def assert_limited(response: httpx2.Response, kind: str) -> int:
    """The seconds after which to try again."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, "rate_limit_exceeded")
    return int(response.headers["Retry-After"])
