"""Whose request it is: by its API key, before anything else of the request is looked at."""

import asyncio
import hashlib
import logging
from collections.abc import Collection
from contextlib import suppress
from enum import Enum

from anyio.to_thread import run_sync
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....storage.errors import LedgerError
from ....storage.ledger.api_keys import KEY_START, ApiKeyRecord, ApiKeys
from ....storage.ledger.records import DEFAULT_TENANT
from ...ttl_cache import TtlCache
from ..errors import RETRY_SOON, error_response
from .foreign_pages import refusal

logger = logging.getLogger(__name__)

# How long a revoked key still holds, and how soon the first key closes the API.
CACHE_SECONDS = 3.0
# While the ledger is away nobody can revoke a key either; what was known goes on for this long.
_STALE_SECONDS = 60.0
# In the request's state.
RESPONSE_HEADERS = "response_headers"
# Of a key that was made here; what is longer is none, and not worth its hash.
_MAX_KEY_LENGTH = 128


class Refused(Enum):
    """Why a request is nobody's; the values are for its sender, and repeat nothing of what was sent."""

    MISSING = "no API key: send one as 'Authorization: Bearer KEY'"
    MALFORMED = "the Authorization header is not of the form 'Bearer KEY', once"
    UNKNOWN = "the API key is unknown or was revoked"


class KeyRing:
    """Which keys hold, as the ledger said a few seconds ago. Thread-safe."""

    def __init__(self, api_keys: ApiKeys, seconds: float = CACHE_SECONDS) -> None:
        self._api_keys = api_keys
        self._is_open: TtlCache[None, bool] = TtlCache(seconds, _STALE_SECONDS)
        self._keys: TtlCache[bytes, ApiKeyRecord | None] = TtlCache(seconds, _STALE_SECONDS)
        # Judgements under way, by what was presented.
        self._judging: dict[str | Refused, asyncio.Task[str | Refused]] = {}
        # What `is_open` last said.
        self.was_open = False

    def is_open(self) -> bool:
        """Whether no key was ever created, so that everybody is the default tenant. Raises `LedgerError`."""
        self.was_open = self._is_open.get(None, lambda: self._api_keys.count() == 0)
        return self.was_open

    def tenant_of(self, key: str) -> str | Refused:
        """Raises `LedgerError`."""
        if not key.startswith(KEY_START) or len(key) > _MAX_KEY_LENGTH:
            return Refused.UNKNOWN
        record = self._keys.get(_digest(key), lambda: self._find(key))
        return Refused.UNKNOWN if record is None else record.tenant

    async def caller(self, given: list[str]) -> str | Refused:
        """The tenant of a request with these Authorization headers; for one event loop. Raises `LedgerError`."""
        key = _bearer(given)
        presented = key if isinstance(key, str) else None
        if self.knows(presented):
            return self._judge(key)
        judging = self._judging.get(key)
        if judging is None:
            # The ledger is asked once for all of a burst, which would otherwise take every thread there is.
            judging = self._judging[key] = asyncio.create_task(run_sync(self._judge, key))
            judging.add_done_callback(lambda _: self._judging.pop(key))
        return await asyncio.shield(judging)

    def _judge(self, key: str | Refused) -> str | Refused:
        if self.is_open():
            return DEFAULT_TENANT
        return key if isinstance(key, Refused) else self.tenant_of(key)

    def knows(self, key: str | None) -> bool:
        """Whether `is_open` and `tenant_of` can answer at once, without the ledger."""
        opened = self._is_open.fresh(None)
        if opened is None:
            return False
        return opened.value or key is None or self._keys.fresh(_digest(key)) is not None

    def _find(self, key: str) -> ApiKeyRecord | None:
        record = self._api_keys.find(key)
        if record is not None:
            # When a key was last used is a courtesy: it must not keep its owner out.
            with suppress(LedgerError):
                self._api_keys.note_use(record)
        return record


class Authentication:
    """ASGI middleware: sets `state.tenant` of HTTP and WebSocket requests, or answers 401 in the app's place.

    Paths in `open_paths` need no key. While none is needed for others, pages of other sites than `allowed_origins` get
    403, with `local_names_only` also whoever calls this machine by a name that may be another's. The answer also gets
    the headers that are put into `state.response_headers`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        open_paths: Collection[str],
        local_names_only: bool = False,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._local_names_only = local_names_only
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._keys.caller(Headers(scope=scope).getlist("authorization"))
        except LedgerError as error:
            logger.warning("a key can not be looked up: %s", error)
            await _refuse(_AWAY, scope, receive, send)
            return
        if isinstance(caller, Refused):
            await _refuse(_unauthorized(caller), scope, receive, send)
            return
        if self._keys.was_open:
            refused = refusal(scope, self._local_names_only, self._allowed_origins)
            if refused is not None:
                await _refuse(refused, scope, receive, send)
                return
        scope.setdefault("state", {})["tenant"] = caller
        scope["state"][RESPONSE_HEADERS] = {}
        await self._app(scope, receive, _adding_headers(scope, send))


def _bearer(given: list[str]) -> str | Refused:
    """The one key of a request. Two headers are refused: proxies disagree about which of them counts."""
    if not given:
        return Refused.MISSING
    kind, _, key = given[0].partition(" ")
    if len(given) > 1 or kind.lower() != "bearer" or not key.strip():
        return Refused.MALFORMED
    return key.strip()


def _digest(key: str) -> bytes:
    """What a key is remembered by: not the key itself."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(reason: Refused) -> Response:
    return error_response(401, reason.value, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


_AWAY = error_response(503, "the ledger does not answer: try again later", "unavailable", headers=RETRY_SOON)


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        # A server that can answer a handshake in one way only, which clients see as 403.
        await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        return
    await response(scope, receive, send)


def _adding_headers(scope: Scope, send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            added: dict[str, str] = scope["state"][RESPONSE_HEADERS]
            present = {name for name, _ in message.get("headers", ())}
            lines = [(name.encode(), value.encode()) for name, value in added.items()]
            message["headers"] = [*message.get("headers", ()), *(line for line in lines if line[0] not in present)]
        await send(message)

    return send_with_headers
