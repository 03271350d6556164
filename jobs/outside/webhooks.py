"""Telling webhooks that a job or a batch has ended: events signed as https://www.standardwebhooks.com has it."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Self

import httpx2

from ...engine.errors import shown
from ...storage.errors import Argument
from ...storage.ledger.ledger import Ledger
from ...storage.ledger.records import NewWebhook
from ...storage.ledger.webhooks import Delivery, Webhooks
from ..errors import SpecError
from ..settings import Settings
from .addresses import AddressRefused, check_web_url, expect_public_host, outside_client

logger = logging.getLogger(__name__)

SEND_SECONDS = 1.0
_TIMEOUT_SECONDS = 15.0
_MAX_AT_ONCE = 32
_LOOK_SECONDS = 0.1
_BASE64_SECRET = "whsec_"
_GONE = 410


def parse_webhook(url: str, secret: str | None = None) -> NewWebhook:
    """Check where an event is to go. Raises `SpecError`; whether the host is allowed shows later."""
    for name, value in (("webhook", url), ("webhook_secret", secret)):
        if not isinstance(value, str | None):
            raise SpecError(Argument(name), f" must be a text, not {shown(value)}", field=name.replace("_", "."))
    try:
        check_web_url(url)
        httpx2.URL(url)
    except (AddressRefused, httpx2.InvalidURL) as error:
        raise _refused(error) from error
    if secret is not None:
        try:
            _key(secret)
        except (binascii.Error, ValueError) as error:
            problem = f" must be base64 after {_BASE64_SECRET}"
            raise SpecError(Argument("webhook_secret"), problem, field="webhook.secret") from error
    return NewWebhook(url, secret)


def optional_webhook(url: str | None, secret: str | None) -> NewWebhook | None:
    """The same where there may be none: then nothing is signed. Raises `SpecError`."""
    if url is not None:
        return parse_webhook(url, secret)
    if secret is not None:
        signed = " signs what is sent to ", Argument("webhook"), ": give both, or neither"
        raise SpecError(Argument("webhook_secret"), *signed, field="webhook.secret")
    return None


def expect_public_receiver(webhook: NewWebhook, settings: Settings) -> None:
    """Refuse now what a sender with these settings would not connect to. Raises `SpecError`."""
    if settings.allow_private_addresses:
        return
    try:
        expect_public_host(webhook.url)
    except AddressRefused as error:
        raise _refused(error) from error


def _refused(error: Exception) -> SpecError:
    return SpecError(Argument("webhook"), f" {error}", field="webhook.url")


@dataclass(frozen=True)
class WebhookSender:
    """Sends what is due. Any number of processes may; each event is sent by one at a time, and again until taken."""

    webhooks: Webhooks
    allow_private_addresses: bool
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)

    @classmethod
    def of(cls, ledger: Ledger, settings: Settings) -> Self:
        return cls(ledger.webhooks, settings.allow_private_addresses)

    def send_due(self) -> None:
        """Takes as long as the slowest receiver, at most 15 seconds. Raises `LedgerError`."""
        deliveries = self.webhooks.claim_due(_MAX_AT_ONCE)
        if deliveries:
            asyncio.run(self._send_all(deliveries))

    def stop(self) -> None:
        """Have `send_due`, in another thread, wait for no receiver any more: another sender tells those again."""
        self._stopping.set()

    async def _send_all(self, deliveries: Sequence[Delivery]) -> None:
        async with outside_client(self.allow_private_addresses, _TIMEOUT_SECONDS) as client:
            await asyncio.gather(*(self._send(client, delivery) for delivery in deliveries))

    async def _send(self, client: httpx2.AsyncClient, delivery: Delivery) -> None:
        status, problem = await self._answer(client, delivery)
        if problem is None:
            await asyncio.to_thread(self.webhooks.delivered, delivery)
            return
        logger.warning("event %s of %s was not taken: %s", delivery.event_id, delivery.subject_id, problem)
        await asyncio.to_thread(self.webhooks.failed, delivery, problem, is_final=status == _GONE)

    async def _answer(self, client: httpx2.AsyncClient, delivery: Delivery) -> tuple[int | None, str | None]:
        """As `_post`, as long as nobody says `stop`."""
        posting = asyncio.ensure_future(_post(client, delivery))
        while not posting.done() and not self._stopping.is_set():
            await asyncio.wait({posting}, timeout=_LOOK_SECONDS)
        if posting.done():
            return posting.result()
        posting.cancel()
        with suppress(asyncio.CancelledError):
            await posting
        return None, "no answer before its sender was stopped"


async def _post(client: httpx2.AsyncClient, delivery: Delivery) -> tuple[int | None, str | None]:
    """The status, and what was wrong, if something was. The answer's body is not read."""
    body = event_body(delivery)
    try:
        # Beside the client's own limits: a receiver that sends a byte now and then would never exceed those.
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            headers = event_headers(delivery, body, int(time.time()))
            async with client.stream("POST", delivery.url, content=body, headers=headers) as response:
                problem = None if response.is_success else f"status {response.status_code}"
                return response.status_code, problem
    except TimeoutError:
        return None, f"no answer in {_TIMEOUT_SECONDS:.0f} s"
    except (httpx2.HTTPError, httpx2.InvalidURL, AddressRefused, ValueError) as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())


def event_body(delivery: Delivery) -> bytes:
    """The same at each attempt."""
    event = {
        "id": delivery.event_id,
        "object": "event",
        "type": delivery.event_type,
        "created_at": int(delivery.event_at),
        "data": {"id": delivery.subject_id},
    }
    return json.dumps(event, separators=(",", ":")).encode()


def event_headers(delivery: Delivery, body: bytes, timestamp: int) -> dict[str, str]:
    """With a signature where there is a secret."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"headrace/{version('headrace')}",
        "webhook-id": delivery.event_id,
        "webhook-timestamp": str(timestamp),
    }
    if delivery.secret is not None:
        signed = f"{delivery.event_id}.{timestamp}.".encode() + body
        digest = hmac.new(_key(delivery.secret), signed, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _key(secret: str) -> bytes:
    if not secret.startswith(_BASE64_SECRET):
        return secret.encode()
    key = base64.b64decode(secret.removeprefix(_BASE64_SECRET), validate=True)
    if not key:
        raise ValueError("no key: anybody could sign with it")
    return key
