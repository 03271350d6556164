"""Tenants: on whose behalf requests are made and jobs are run, and what each may ask for."""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from ..database import Database
from ..errors import LedgerError
from .clock import now
from .records import DEFAULT_TENANT
from .tables import tenants

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
# What a 32-bit column and a 64-bit one hold.
_LARGEST = {"requests_per_minute": 2**31 - 1, "queued_tokens": 2**63 - 1, "concurrent_jobs": 2**31 - 1, "weight": 10**6}


class TenantError(LedgerError):
    """A tenant can not be named or limited like this."""


@dataclass(frozen=True)
class TenantRecord:
    """What a tenant may ask for; a limit of None is none.

    `queued_tokens`: prompt and answer tokens of all that is asked for and not yet answered. `concurrent_jobs`: jobs
    that have not ended. `weight`: the tenant's share where several wait, relative to the others'.
    """

    name: str
    requests_per_minute: int | None = None
    queued_tokens: int | None = None
    concurrent_jobs: int | None = None
    weight: int = 1
    created_at: float | None = None


class Tenants:
    """The table of tenants. Every method is one transaction and raises what `Ledger`'s raise."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, name: str) -> TenantRecord:
        """A tenant that was never set has no limits."""
        with self._database.read() as connection:
            row = connection.execute(select(tenants).where(tenants.c.name == name)).one_or_none()
        return TenantRecord(name) if row is None else TenantRecord(**row._mapping)

    def all(self) -> list[TenantRecord]:
        """By name, the default one included."""
        with self._database.read() as connection:
            rows = connection.execute(select(tenants).order_by(tenants.c.name)).all()
        found = [TenantRecord(**row._mapping) for row in rows]
        is_known = any(tenant.name == DEFAULT_TENANT for tenant in found)
        return found if is_known else sorted([TenantRecord(DEFAULT_TENANT), *found], key=lambda tenant: tenant.name)

    def set(self, name: str, **changes: int | None) -> TenantRecord:
        """Change limits or the weight, of a new tenant too; what is not named stays. Raises TenantError."""
        for field, value in changes.items():
            _check_limit(field, value)
        with self._database.write() as connection:
            ensure_tenant(connection, name)
            if changes:
                connection.execute(update(tenants).where(tenants.c.name == name).values(**changes))
        return self.get(name)


def ensure_tenant(connection: Connection, name: str) -> None:
    """Make a tenant without limits unless there is one of this name. Raises TenantError."""
    check_tenant_name(name)
    if connection.scalar(select(tenants.c.name).where(tenants.c.name == name)) is None:
        connection.execute(insert(tenants).values(name=name, weight=1, created_at=now()))


def check_tenant_name(name: str) -> None:
    """Raises TenantError."""
    if not _NAME.fullmatch(name):
        raise TenantError(
            f"tenant {name!r}: a name has up to 64 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit"
        )


def _check_limit(field: str, value: Any) -> None:
    largest = _LARGEST[field]
    if value is None and field != "weight":
        return
    # No token or job at all is a limit too; a weight of zero would be a queue that never moves.
    least = 1 if field == "weight" else 0
    if not isinstance(value, int) or not least <= value <= largest:
        raise TenantError(f"{field} must be a whole number from {least} to {largest}, not {value!r}")
