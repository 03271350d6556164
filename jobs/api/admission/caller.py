"""On whose behalf a request is made."""

from starlette.requests import HTTPConnection

from ....storage.ledger.records import DEFAULT_TENANT


def tenant_of(connection: HTTPConnection) -> str:
    """The tenant whose key came with the request; the one tenant there is while no keys were created."""
    tenant: str = getattr(connection.state, "tenant", DEFAULT_TENANT)
    return tenant
