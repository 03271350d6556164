"""`/health`: the process is up. `/ready`: it can do its work."""

from collections.abc import Callable
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Response
from redis.exceptions import RedisError

from ...storage.errors import LedgerError
from ..client.client import Client
from ..embedded.valkey import EmbeddedValkeyError
from .schemas import Readiness
from .state import client_of

_PATIENCE_SECONDS = 3.0
_OK = "ok"
router = APIRouter(tags=["health"])


# Probes such as wget's --spider want no body.
@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Says that the process is up, and nothing of what it needs."""
    return {"status": _OK}


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"model": Readiness}})
async def ready(client: Annotated[Client, Depends(client_of)], response: Response) -> Readiness:
    """Whether the ledger and Redis answer; with 503 if one does not."""
    found: dict[str, str] = {}
    async with anyio.create_task_group() as group:
        for name, check in (("ledger", client.ping_ledger), ("redis", client.ping_redis)):
            group.start_soon(_look, name, check, found)
    is_ready = set(found.values()) == {_OK}
    response.status_code = 200 if is_ready else 503
    return Readiness(ready=is_ready, **found)


async def _look(name: str, check: Callable[[], Any], found: dict[str, str]) -> None:
    try:
        with anyio.fail_after(_PATIENCE_SECONDS):
            await run_sync(check, abandon_on_cancel=True)
    except TimeoutError:
        found[name] = f"no answer in {_PATIENCE_SECONDS:.0f} s"
    except (LedgerError, RedisError, EmbeddedValkeyError) as error:
        found[name] = " ".join(str(error).split())
    else:
        found[name] = _OK
