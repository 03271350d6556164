"""Which requests find each other's prompts in the prefix cache."""

from ...storage.ledger.records import DEFAULT_TENANT


def cache_salt(tenant: str) -> str | None:
    """As the engine's `Request` has it: an answer's `cached_tokens` are not to tell one tenant what another has asked.

    Where nobody has said whose anything is there is none.
    """
    return None if tenant == DEFAULT_TENANT else tenant
