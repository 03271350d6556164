"""What exists for whom, without a worker."""

from typing import Any

import pytest
from starlette.testclient import WebSocketDenialResponse

from headrace.jobs.live.requests import LiveRequest
from headrace.jobs.spec.sampling import SamplingSpec

from .conftest import Desk


def belongings(desk: Desk, tenant: str) -> dict[str, str]:
    """One of everything that has an id, by the name that the routes have for it."""
    key = desk.key(tenant)
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "model", "prompt": "a"}}'
    file = desk.http.post(
        "/v1/files", headers=key, files={"file": ("in.jsonl", line.encode())}, data={"purpose": "batch"}
    )
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    request = LiveRequest.new(
        queue="headrace.live.other", model="model", prompt_token_ids=[1], sampling=SamplingSpec(), tenant=tenant
    )
    desk.client.live.submit(request)
    return {
        "job_id": desk.submit(tenant).json()["id"],
        "file_id": file.json()["id"],
        "batch_id": desk.http.post("/v1/batches", headers=key, json=batch).json()["id"],
        "request_id": request.id,
    }


# Ids that belong to nobody.
COMMON = {"model"}
# What is looked for within what has an id.
PARTS = {"row": "0"}
BODIES: dict[str, dict[str, Any]] = {"/jobs/{job_id}/priority": {"priority": 1}}


def test_what_is_another_tenants_does_not_exist(desk: Desk) -> None:
    owned = belongings(desk, "acme")
    routes = desk.app.openapi()["paths"]
    seen = set()
    for path, method in [(path, method) for path, methods in routes.items() for method in methods]:
        names = {name for name in owned if f"{{{name}}}" in path}
        assert names or "{" not in path or any(f"{{{name}}}" in path for name in COMMON), f"teach this test {path}"
        if names:
            seen |= names
            body = BODIES.get(path)
            answer = desk.http.request(method, path.format(**owned, **PARTS), headers=desk.key("other"), json=body)
            assert answer.status_code == 404, (method, path, answer.text)
            (code,) = {name.removesuffix("_id") + "_not_found" for name in names}
            assert answer.json()["error"]["code"] == code, (method, path)
            assert answer.json() == desk.http.request(
                method, path.format(**dict.fromkeys(owned, "unknown"), **PARTS), headers=desk.key("other"), json=body
            ).json() | {"error": answer.json()["error"]}
    assert seen == owned.keys()
    # Its owner has lost nothing.
    for path in ("/jobs/{job_id}", "/v1/files/{file_id}", "/v1/batches/{batch_id}", "/jobs/{job_id}/results"):
        assert desk.http.get(path.format(**owned), headers=desk.key("acme")).status_code == 200, path
    assert desk.http.get(f"/jobs/{owned['job_id']}", headers=desk.key("acme")).json()["state"] == "running"
    with pytest.raises(WebSocketDenialResponse):
        desk.http.websocket_connect(f"/requests/{owned['request_id']}/stream", headers=desk.key("other")).__enter__()


def test_lists_show_ones_own(desk: Desk) -> None:
    owned = belongings(desk, "acme")
    for path, name in (("/jobs", "job_id"), ("/v1/files", "file_id"), ("/v1/batches", "batch_id")):
        own = desk.http.get(path, headers=desk.key("acme")).json()["data"]
        assert owned[name] in [item["id"] for item in own]
        assert desk.http.get(path, headers=desk.key("other")).json()["data"] == []
    # On the machine itself everything is seen.
    assert owned["job_id"] in [job.id for job in desk.client.jobs()]
    assert desk.client.job(owned["job_id"]).record.tenant == "acme"
    stolen = {"input_file_id": owned["file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert desk.http.post("/v1/batches", headers=desk.key("other"), json=stolen).status_code == 404


def test_idempotency_keys_are_the_tenants_own(desk: Desk) -> None:
    named = {"Idempotency-Key": "nightly"}
    ids = [desk.submit(tenant, **named).json()["id"] for tenant in ("acme", "other", "acme")]
    assert ids[0] == ids[2] != ids[1]


def test_a_client_cannot_have_its_job_taken_for_a_batchs(desk: Desk) -> None:
    refused = desk.submit("acme", **{"Idempotency-Key": "batch/batch_1"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "Idempotency-Key")
