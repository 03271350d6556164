"""Every name that live requests have in Redis."""

CANCEL_CHANNEL = "headrace:live:cancel"
# Written to see whether Redis takes anything in.
PROBE_KEY = "headrace:live:probe"


def request_key(request_id: str) -> str:
    """A hash: what was asked, and how it stands."""
    return f"headrace:live:{request_id}"


def open_key(queue: str) -> str:
    """A sorted set of the queue's requests that have not ended.

    Scores are seconds of the Redis server's clock: when the lease ends, or since when the request waits.
    """
    return f"headrace:live:open:{queue}"


def tenant_key(tenant: str) -> str:
    """A sorted set of a tenant's requests that have not ended; scores say until when they count at most."""
    return f"headrace:live:tenant:{tenant}"
