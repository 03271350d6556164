"""Webhooks of batches: each end of a batch is told as OpenAI's webhooks tell it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from headrace.jobs.outside.webhooks import WebhookSender
from headrace.storage.ledger.batch_records import BatchState, BatchTotals, NewBatch
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewWebhook, WebhookState

from .batch_lines import CHAT, chat_line, create, wait_for
from .conftest import ApiServer
from .receiver import Receiver

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NOTHING = BatchTotals(0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "state"), [(chat_line("a"), "completed"), ({"custom_id": "a"}, "failed")], ids=["completed", "failed"]
)
def test_the_official_client_reads_the_event(
    api: ApiServer, openai_client: Any, receiver: Receiver, wait_until: Callable[..., None], line: Any, state: str
) -> None:
    batch = create(openai_client, [line], extra_body={"webhook": {"url": f"{receiver.url}/hooks", "secret": SECRET}})
    wait_until(lambda: bool(receiver.received), "the event has come")
    (event,) = receiver.received
    told = openai_client.webhooks.unwrap(event.body, event.headers, secret=SECRET)
    assert (told.type, told.object, told.data.id) == (f"batch.{state}", "event", batch.id)
    ended = wait_for(openai_client, batch, state)
    assert told.created_at == getattr(ended, f"{state}_at")
    path = f"/v1/batches/{batch.id}/webhooks"
    wait_until(lambda: api.get(path)["data"] == [{"state": "delivered", "error": None}], "it is noted")


def test_a_webhook_that_is_none_is_refused(api: ApiServer, openai_client: Any) -> None:
    for webhook, param in (
        ({"url": "ftp://example.com/"}, "webhook.url"),
        ({"url": "https://example.com/\0"}, "webhook.url"),
        ({"url": "https://example.com/", "secret": "whsec_"}, "webhook.secret"),
        ({}, "webhook.url"),
    ):
        with pytest.raises(BadRequestError) as refused:
            create(openai_client, [], extra_body={"webhook": webhook})
        assert refused.value.param == param
    with pytest.raises(NotFoundError):
        openai_client.get("/batches/batch_none/webhooks", cast_to=object)


def test_every_end_is_told_once_and_again_until_it_is_taken(ledger: Ledger, receiver: Receiver) -> None:
    batches, sender = ledger.batches, WebhookSender(ledger.webhooks, allow_private_addresses=True)
    for name in ("completed", "cancelled", "expired", "waiting"):
        webhook = NewWebhook(receiver.url, SECRET)
        batches.add(NewBatch(name, "t", CHAT, "file-in", "24h", 60.0, webhook=webhook))
        batches.claim(name, "one", 60.0)
    sender.send_due()
    assert not receiver.received
    batches.begin("completed", "one", "job", "m")
    batches.begin_finalizing("completed", "one")
    batches.finish("completed", "one", BatchState.COMPLETED, None, None, NOTHING)
    batches.cancel("t", "cancelled")
    batches.finish("cancelled", "one", BatchState.CANCELLED, None, None, NOTHING)
    batches.expire("expired", "one", [])
    receiver.statuses.append(500)
    for _ in range(2):
        sender.send_due()
    events = [json.loads(event.body) for event in receiver.received]
    names = ("completed", "cancelled", "expired")
    assert sorted((event["type"], event["data"]["id"]) for event in events) == sorted((f"batch.{n}", n) for n in names)
    states = [ledger.webhooks.of_batch(name)[0][0] for name in (*names, "waiting")]
    assert sorted(states[:3]) == [WebhookState.DELIVERED, WebhookState.DELIVERED, WebhookState.PENDING]
    assert states[3] is WebhookState.WAITING
