"""API keys: who they belong to and whether they hold. Of the key itself only its hash is kept."""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select, update

from ..database import Database
from ..errors import LedgerError
from .clock import now
from .tables import api_keys
from .tenants import ensure_tenant

KEY_START = "hr-"
_KEY_BYTES = 32
# What is shown of a key: enough to tell keys apart, and 208 of its 256 bits short of using it.
_PREFIX_LENGTH = len(KEY_START) + 8
_USE_IS_NOTED_EVERY_SECONDS = 60.0


class UnknownKey(LedgerError):
    """No API key has that id."""


@dataclass(frozen=True)
class ApiKeyRecord:
    """A key as people may see it. `last_used_at` is right to about a minute."""

    id: str
    tenant: str
    name: str | None
    prefix: str
    created_at: float
    revoked_at: float | None
    last_used_at: float | None


@dataclass(frozen=True)
class NewApiKey:
    """`secret` is the key itself: it is nowhere else, and can not be shown again."""

    record: ApiKeyRecord
    secret: str

    def __repr__(self) -> str:
        return f"NewApiKey({self.record.id})"


_SHOWN = [column for column in api_keys.c if column.name != "sha256"]


class ApiKeys:
    """The table of keys. Every method is one transaction and raises what `Ledger`'s raise."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, tenant: str, name: str | None = None) -> NewApiKey:
        """A new key, of a new tenant if there is none of this name. Raises TenantError."""
        secret = KEY_START + secrets.token_urlsafe(_KEY_BYTES)
        values = {"tenant": tenant, "name": name, "prefix": secret[:_PREFIX_LENGTH], "sha256": _digest(secret)}
        key_id = f"key_{secrets.token_hex(6)}"
        with self._database.write() as connection:
            ensure_tenant(connection, tenant)
            connection.execute(insert(api_keys).values(id=key_id, created_at=now(), **values))
        return NewApiKey(self.get(key_id), secret)

    def get(self, key_id: str) -> ApiKeyRecord:
        """Raises UnknownKey."""
        found = self._records(api_keys.c.id == key_id)
        if not found:
            raise UnknownKey(f"API key {key_id!r} is unknown: `headrace keys list` lists those there are")
        return found[0]

    def all(self) -> list[ApiKeyRecord]:
        """The oldest first, revoked ones included."""
        return self._records()

    def count(self) -> int:
        """Of all that were ever created: a ledger whose keys are all revoked is closed, not open."""
        with self._database.read() as connection:
            return connection.scalar(select(func.count()).select_from(api_keys)) or 0

    def revoke(self, key_id: str) -> ApiKeyRecord:
        """Have a key hold no longer; one that was revoked keeps its time. Raises UnknownKey."""
        with self._database.write() as connection:
            held = update(api_keys).where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
            connection.execute(held.values(revoked_at=now()))
        return self.get(key_id)

    def find(self, secret: str) -> ApiKeyRecord | None:
        """The key that was created as `secret`, unless it was revoked."""
        of_prefix = select(api_keys).where(
            api_keys.c.prefix == secret[:_PREFIX_LENGTH], api_keys.c.revoked_at.is_(None)
        )
        with self._database.read() as connection:
            rows = [dict(row._mapping) for row in connection.execute(of_prefix)]
        digest = _digest(secret)
        for row in rows:
            # The database has compared what may be known; the rest takes the same time wherever it differs.
            if hmac.compare_digest(row.pop("sha256"), digest):
                return ApiKeyRecord(**row)
        return None

    def note_use(self, key: ApiKeyRecord) -> None:
        """Remember that a key is used now, unless its record says that it was a moment ago."""
        if key.last_used_at is None or key.last_used_at < time.time() - _USE_IS_NOTED_EVERY_SECONDS:
            with self._database.write() as connection:
                connection.execute(update(api_keys).where(api_keys.c.id == key.id).values(last_used_at=now()))

    def _records(self, *conditions: ColumnElement[Any]) -> list[ApiKeyRecord]:
        wanted = select(*_SHOWN).where(*conditions).order_by(api_keys.c.created_at, api_keys.c.id)
        with self._database.read() as connection:
            return [ApiKeyRecord(**row._mapping) for row in connection.execute(wanted)]


def _digest(secret: str) -> str:
    # 256 random bits are not guessed: a slow hash, made for passwords, would only slow down every request.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
