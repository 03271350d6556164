"""Webhooks: an event for each end of a job, signed, sent until it is taken, by one process at a time."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from sqlalchemy import select, update

from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.outside import webhooks as sending
from headrace.jobs.outside.webhooks import WebhookSender, parse_webhook
from headrace.jobs.periodic import Periodic
from headrace.jobs.settings import Settings
from headrace.storage.ledger.clock import now
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewJob, NewPart, NewShard, NewWebhook, WebhookState
from headrace.storage.ledger.tables import webhooks as table

from ...storage.ledger.claiming import take_shard
from ..running import MODEL, environment
from .conftest import ApiServer
from .in_process import in_process_server
from .receiver import Receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
JOB = "job_1"


def create(ledger: Ledger, url: str, job_id: str = JOB, within_seconds: float | None = None) -> None:
    job = NewJob(job_id, "q", "m", f"/{job_id}", "f", 4, within_seconds=within_seconds, webhook=NewWebhook(url, SECRET))
    ledger.create_job(job, [NewShard(0, 4, "/spool")])


def finish(ledger: Ledger, job_id: str = JOB, number: int = 0, num_failed: int = 0) -> None:
    claim = take_shard(ledger, f"{job_id}/{number:05d}", "owner", 60)
    assert claim is not None
    ledger.leases.commit_part(claim, NewPart(f"part-{number}.parquet", 4, num_failed))
    ledger.leases.finish_shard(claim)


def sender(ledger: Ledger, allow_private_addresses: bool = True) -> WebhookSender:
    return WebhookSender(ledger.webhooks, allow_private_addresses)


def states(ledger: Ledger) -> list[WebhookState]:
    return [state for state, _ in ledger.webhooks.of_job(JOB)]


def let_pauses_pass(ledger: Ledger) -> None:
    with ledger.database.write() as connection:
        connection.execute(update(table).values(next_attempt_at=0))


def test_a_job_tells_of_its_end(api: ApiServer, receiver: Receiver, wait_until: Callable[..., None]) -> None:
    rows = [{"text": "Where is my parcel?"}]
    webhook = {"url": f"{receiver.url}/hooks", "secret": SECRET}
    job = api.post("/jobs", model=api.model, rows=rows, prompt="{text}", choices=["a", "b"], webhook=webhook)
    wait_until(lambda: bool(receiver.received), "the event has come")
    (event,) = receiver.received
    verified = OpenAI(api_key="none").webhooks.unwrap(event.body, event.headers, secret=SECRET)
    assert (verified.type, verified.data.id) == ("job.completed", job["id"])
    assert verified.id == event.headers["webhook-id"]
    assert verified.created_at == int(api.get(f"/jobs/{job['id']}")["finished_at"])
    assert event.path == "/hooks"
    wait_until(lambda: told(api, job["id"]) == [{"state": "delivered", "error": None}], "it is noted")
    with pytest.raises(InvalidWebhookSignatureError):
        OpenAI(api_key="none").webhooks.unwrap(event.body + b" ", event.headers, secret=SECRET)


def told(api: ApiServer, job_id: str) -> object:
    return api.get(f"/jobs/{job_id}/webhooks")["data"]


def test_nothing_is_sent_before_the_end(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    sender(ledger).send_due()
    assert (receiver.received, states(ledger)) == ([], [WebhookState.WAITING])


def test_it_is_sent_again_until_it_is_taken(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    receiver.statuses += [500, 302]
    for _ in range(3):
        # Not before the pause is over.
        sender(ledger).send_due()
        sender(ledger).send_due()
        let_pauses_pass(ledger)
    assert states(ledger) == [WebhookState.DELIVERED]
    assert len(receiver.received) == 3
    assert (
        len({event.body for event in receiver.received})
        == len({e.headers["webhook-id"] for e in receiver.received})
        == 1
    )
    sender(ledger).send_due()
    assert len(receiver.received) == 3


def test_pauses_grow_until_a_day_has_passed(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    pauses: list[float] = []
    hooks = ledger.webhooks
    while states(ledger) != [WebhookState.FAILED]:
        (delivery,) = hooks.claim_due(10)
        hooks.failed(delivery, "refused")
        with ledger.database.write() as connection:
            row = connection.execute(table.select()).one()
            if row.next_attempt_at is not None:
                pauses.append(row.next_attempt_at - (connection.scalar(select(now())) or 0.0))
                # As if that time had passed.
                earlier = {"next_attempt_at": 0, "event_at": row.event_at - pauses[-1]}
                connection.execute(update(table).values(earlier))
        assert len(pauses) < 30
    assert pauses == pytest.approx([min(5 * 3**number, 4 * 3600) for number in range(len(pauses))], abs=5)
    assert 20 * 3600 < sum(pauses) <= 24 * 3600


@pytest.mark.parametrize("status", [410])
def test_a_receiver_that_is_gone_for_good_is_left_alone(ledger: Ledger, receiver: Receiver, status: int) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    receiver.statuses.append(status)
    sender(ledger).send_due()
    assert ledger.webhooks.of_job(JOB) == [(WebhookState.FAILED, "status 410")]


def test_no_redirect_is_followed(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, f"{receiver.url}/a")
    receiver.redirects["/a"] = f"{receiver.url}/b"
    finish(ledger)
    sender(ledger).send_due()
    assert [event.path for event in receiver.received] == ["/a"]
    assert ledger.webhooks.of_job(JOB) == [(WebhookState.PENDING, "status 302")]


def test_two_processes_do_not_send_the_same_event(ledger: Ledger, receiver: Receiver) -> None:
    for number in range(8):
        create(ledger, receiver.url, f"job_{number}")
        finish(ledger, f"job_{number}")
    barrier = threading.Barrier(4)

    def send() -> None:
        barrier.wait()
        sender(ledger).send_due()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(send) for _ in range(4)]:
            done.result()
    ids = [json.loads(event.body)["data"]["id"] for event in receiver.received]
    assert sorted(ids) == [f"job_{number}" for number in range(8)]


def test_who_is_told_to_stop_waits_for_no_receiver(
    ledger: Ledger, receiver: Receiver, wait_until: Callable[..., None]
) -> None:
    receiver.hold.clear()
    create(ledger, receiver.url)
    finish(ledger)
    stopped = sender(ledger)
    with Periodic("webhooks", 0.001, stopped.send_due, stopped.stop):
        wait_until(lambda: bool(receiver.received), "it is told")
    assert ledger.webhooks.of_job(JOB) == [(WebhookState.PENDING, "no answer before its sender was stopped")]
    receiver.hold.set()
    let_pauses_pass(ledger)
    sender(ledger).send_due()
    assert states(ledger) == [WebhookState.DELIVERED]
    assert len({event.headers["webhook-id"] for event in receiver.received}) == 1


def test_a_receiver_that_never_answers_is_tried_again(
    ledger: Ledger, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_TIMEOUT_SECONDS", 0.1)
    receiver.hold.clear()
    create(ledger, receiver.url)
    finish(ledger)
    sender(ledger).send_due()
    ((state, error),) = ledger.webhooks.of_job(JOB)
    assert state is WebhookState.PENDING
    assert error is not None


def test_an_attempt_whose_process_died_is_made_again(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    assert len(ledger.webhooks.claim_due(10)) == 1
    sender(ledger).send_due()
    assert not receiver.received
    let_pauses_pass(ledger)
    sender(ledger).send_due()
    assert states(ledger) == [WebhookState.DELIVERED]


def test_private_addresses_are_refused(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    sender(ledger, allow_private_addresses=False).send_due()
    ((state, error),) = ledger.webhooks.of_job(JOB)
    assert (receiver.received, state) == ([], WebhookState.PENDING)
    assert "127.0.0.1" in str(error)


def test_private_addresses_are_refused_when_a_job_or_a_batch_is_submitted(tmp_path: Path, receiver: Receiver) -> None:
    surroundings = environment(tmp_path) | {"HEADRACE_ALLOW_PRIVATE_ADDRESSES": "false"}
    problem = "is not on the public internet; HEADRACE_ALLOW_PRIVATE_ADDRESSES=true allows it"
    with Client(Settings.from_environment(surroundings)) as client:
        for host in ("127.0.0.1", "localhost"):
            url = receiver.url.replace("127.0.0.1", host)
            with pytest.raises(SpecError, match=problem):
                client.submit([{"text": "x"}], MODEL, tmp_path / "out", prompt="{text}", webhook=url)
        assert not client.jobs()
        with in_process_server(client) as server, httpx2.Client(base_url=server.url, timeout=90) as http:
            file = {"file": ("in.jsonl", b"{}")}
            answer = http.post("/v1/files", files=file, data={"purpose": "batch"})
            uploaded = answer.raise_for_status().json()["id"]
            asked = {"input_file_id": uploaded, "endpoint": "/v1/completions", "completion_window": "24h"}
            refused = http.post("/v1/batches", json=asked | {"webhook": {"url": receiver.url}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "webhook.url")
            assert problem in refused.json()["error"]["message"]
            # Where it is not known yet who that is, it shows when the event is sent.
            later = asked | {"webhook": {"url": "https://nobody.invalid/"}}
            assert http.post("/v1/batches", json=later).status_code == 200


def event_types(receiver: Receiver) -> list[str]:
    return [json.loads(event.body)["type"] for event in receiver.received]


def test_how_a_job_ended_is_told(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url, "job_c")
    ledger.cancel_job("job_c")
    sender(ledger).send_due()
    create(ledger, receiver.url, "job_f")
    finish(ledger, "job_f", num_failed=4)
    sender(ledger).send_due()
    create(ledger, receiver.url, "job_e", within_seconds=-1)
    finish(ledger, "job_e", num_failed=4)
    sender(ledger).send_due()
    create(ledger, receiver.url, "job_s", within_seconds=60)
    finish(ledger, "job_s", num_failed=3)
    sender(ledger).send_due()
    assert event_types(receiver) == ["job.cancelled", "job.failed", "job.expired", "job.completed"]


def test_the_end_of_a_retry_is_told_too(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger, num_failed=1)
    sender(ledger).send_due()
    assert ledger.retry_job(JOB, [NewShard(1, 1, "/spool", retry_of=0)])
    sender(ledger).send_due()
    assert len(receiver.received) == 1
    finish(ledger, number=1)
    sender(ledger).send_due()
    assert event_types(receiver) == ["job.completed"] * 2
    assert len({event.headers["webhook-id"] for event in receiver.received}) == 2


def test_a_deleted_job_tells_nothing(ledger: Ledger, receiver: Receiver) -> None:
    create(ledger, receiver.url)
    finish(ledger)
    ledger.delete_job(JOB)
    sender(ledger).send_due()
    assert not receiver.received


@pytest.mark.parametrize(
    ("url", "secret", "field"),
    [
        ("ftp://example.com/", None, "url"),
        ("file:///etc/passwd", None, "url"),
        ("http://", None, "url"),
        ("http://user:password@example.com/", None, "url"),
        ("http://example.com:99999/", None, "url"),
        ("http://example.com/\r\nX-Evil: 1", None, "url"),
        ("http://[::1/", None, "url"),
        ("https://example.com/", "whsec_no base64", "secret"),
        ("https://example.com/", "whsec_", "secret"),
    ],
)
def test_a_webhook_that_is_none(url: str, secret: str | None, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_webhook(url, secret)
    assert refused.value.field == f"webhook.{field}"
