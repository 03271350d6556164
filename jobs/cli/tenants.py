"""`headrace tenants`: what each may ask of `headrace serve`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ...storage.ledger.tenants import TenantRecord
from ..errors import SpecError
from ..open_ledger import open_ledger
from ..settings import Settings
from .keys import AsJson
from .tables import print_table

tenants = typer.Typer(
    name="tenants", help="Tenants: whose keys they are, with limits and shares.", rich_markup_mode=None
)

_UNLIMITED = "none"
_LIMITS = ("requests_per_minute", "queued_tokens", "concurrent_jobs")


@tenants.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant, made if there is none.")],
    requests_per_minute: Annotated[
        str | None, typer.Option("--requests-per-minute", metavar="N|none", help="Requests that ask for work.")
    ] = None,
    queued_tokens: Annotated[
        str | None,
        typer.Option("--queued-tokens", metavar="N|none", help="Tokens, with those of open answers, not yet answered."),
    ] = None,
    concurrent_jobs: Annotated[
        str | None, typer.Option("--concurrent-jobs", metavar="N|none", help="Jobs that have not ended.")
    ] = None,
    weight: Annotated[
        int | None, typer.Option("--weight", metavar="N", help="Share where several wait; 2 is twice that of 1.")
    ] = None,
) -> None:
    """Set a tenant's limits; those not named stay. They hold within seconds."""
    asked = dict(zip(_LIMITS, (requests_per_minute, queued_tokens, concurrent_jobs), strict=True))
    changes = {limit: _number(limit, text) for limit, text in asked.items() if text is not None}
    if weight is not None:
        changes["weight"] = weight
    if not changes:
        raise SpecError("name a limit to set: see `headrace tenants set --help`")
    with open_ledger(Settings.from_environment()) as ledger:
        tenant = ledger.tenants.set(name, **changes)
    limits = ", ".join(f"{limit} {_shown(getattr(tenant, limit))}" for limit in (*_LIMITS, "weight"))
    typer.echo(f"{name}: {limits}")


@tenants.command("list")
def list_tenants(as_json: AsJson = False) -> None:
    """List tenants with their limits."""
    with open_ledger(Settings.from_environment()) as ledger:
        found = ledger.tenants.all()
    if as_json:
        typer.echo(json.dumps([asdict(tenant) for tenant in found]))
        return
    print_table(("TENANT", "REQUESTS/MIN", "QUEUED TOKENS", "CONCURRENT JOBS", "WEIGHT"), map(_line, found))


def _line(tenant: TenantRecord) -> tuple[str, ...]:
    return (tenant.name, *(_shown(getattr(tenant, limit)) for limit in (*_LIMITS, "weight")))


def _shown(limit: int | None) -> str:
    return _UNLIMITED if limit is None else f"{limit:,}"


def _number(limit: str, text: str) -> int | None:
    if text == _UNLIMITED:
        return None
    if not text.isascii() or not text.isdecimal():
        raise SpecError(f"--{limit.replace('_', '-')} must be a whole number or none, not {text!r}")
    return int(text)
