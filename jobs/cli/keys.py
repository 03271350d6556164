"""`headrace keys`: create, list and revoke the API keys of `headrace serve`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ...storage.ledger.api_keys import ApiKeyRecord
from ...storage.ledger.records import DEFAULT_TENANT
from ..open_ledger import open_ledger
from ..settings import Settings
from .tables import print_table, time_text

keys = typer.Typer(name="keys", help="API keys: who may send requests to `headrace serve`.", rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@keys.command("create")
def create(
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose key it is.")] = DEFAULT_TENANT,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="What it is for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it, this once: only its hash is kept."""
    with open_ledger(Settings.from_environment()) as ledger:
        is_first = ledger.api_keys.count() == 0
        created = ledger.api_keys.create(tenant, name)
    if as_json:
        typer.echo(json.dumps({**asdict(created.record), "key": created.secret}))
    else:
        typer.echo(created.secret)
        typer.echo(f"{created.record.id} of tenant {tenant}: keep the key now, it can not be shown again.", err=True)
    if is_first:
        typer.echo("This is the first key: from now on every request to `headrace serve` needs one.", err=True)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List the keys by their first characters, the oldest first."""
    with open_ledger(Settings.from_environment()) as ledger:
        found = ledger.api_keys.all()
    if as_json:
        typer.echo(json.dumps([asdict(key) for key in found]))
        return
    print_table(("ID", "TENANT", "KEY", "STATE", "CREATED", "LAST USED", "NAME"), map(_line, found))


@keys.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="A key's id, as `keys list` shows it.")]) -> None:
    """Have a key hold no longer: requests with it are refused within seconds."""
    with open_ledger(Settings.from_environment()) as ledger:
        revoked = ledger.api_keys.revoke(key_id)
        is_last = all(key.revoked_at is not None for key in ledger.api_keys.all())
    typer.echo(f"{revoked.id} ({revoked.prefix}…) of tenant {revoked.tenant} is revoked")
    if is_last:
        typer.echo("No key is left: `headrace serve` refuses every request until one is created.", err=True)


def _line(key: ApiKeyRecord) -> tuple[str, ...]:
    state = "holds" if key.revoked_at is None else "revoked"
    used = "never" if key.last_used_at is None else time_text(key.last_used_at)
    return (key.id, key.tenant, f"{key.prefix}…", state, time_text(key.created_at), used, key.name or "")
