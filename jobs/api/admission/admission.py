"""What is let in: requests within their tenant's limits and within what may wait here in all. The rest gets 429."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Self

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from ....storage.ledger.ledger import Ledger
from ....storage.ledger.quotas import Quota
from ....storage.ledger.tenants import TenantRecord
from ...settings import Settings
from ...ttl_cache import TtlCache
from ..errors import LIVE_RETRY_SECONDS, RateLimited, too_many_open
from .authentication import RESPONSE_HEADERS
from .caller import tenant_of
from .rate_limits import Hold, RateLimits, Usage

# How soon a changed limit holds, and how old the count of a tenant's bulk tokens may be for a live request.
_CACHE_SECONDS = 3.0
_STALE_SECONDS = 60.0


@dataclass(frozen=True)
class _Standing:
    """What the ledger says of a tenant. `bulk_tokens`: of its jobs, counted only where there is a limit to tokens."""

    tenant: TenantRecord
    bulk_tokens: int


class LiveAdmission:
    """The right to one live request. Its tokens count until it is released, or left as a context manager."""

    def __init__(self, limits: RateLimits, hold: Hold | None) -> None:
        self._limits = limits
        self._hold = hold

    def release(self) -> None:
        """Call it when the request has ended, however it did. Never waits or raises; may be called again."""
        if self._hold is not None:
            self._limits.release(self._hold)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """Decides which requests may come in. Thread-safe; every method asks Redis, and the ledger every few seconds.

    Raises `RateLimited`, redis' errors, `LedgerError`. `num_unanswered`: how many live requests of a queue have not
    ended.
    """

    def __init__(
        self, settings: Settings, ledger: Ledger, limits: RateLimits, num_unanswered: Callable[[str], int]
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._limits = limits
        self._num_unanswered = num_unanswered
        self._standings: TtlCache[str, _Standing] = TtlCache(_CACHE_SECONDS, _STALE_SECONDS)

    def admit_live(self, connection: HTTPConnection, queue: str, num_tokens: int) -> LiveAdmission:
        """Let a live request in, or raise. `num_tokens`: of its prompt and the most of all its answers.

        The answer of `connection` gets the `x-ratelimit-*` headers.
        """
        if self._num_unanswered(queue) >= self._settings.max_open_requests:
            # What comes at once is counted when it is queued.
            raise too_many_open()
        standing = self._standing(tenant_of(connection))
        tenant = standing.tenant
        if tenant.requests_per_minute is None and tenant.queued_tokens is None:
            return LiveAdmission(self._limits, None)
        usage, hold = self._limits.admit(
            tenant.name,
            tenant.requests_per_minute,
            tenant.queued_tokens,
            standing.bulk_tokens,
            num_tokens,
            secrets.token_hex(12),
        )
        self._answer(connection, standing, usage, num_tokens)
        return LiveAdmission(self._limits, hold)

    def weight_of(self, connection: HTTPConnection) -> int:
        """The share of the caller's requests while several tenants' wait."""
        return self._standing(tenant_of(connection)).tenant.weight

    def admit_job(self, connection: HTTPConnection) -> Quota:
        """Let a request for a job in, or raise; what the job is then to be held to when it is recorded."""
        tenant = self.admit_request(connection)
        # Of the live requests Redis knows, of the jobs the ledger.
        held = 0 if tenant.queued_tokens is None else self._limits.held_tokens(tenant.name)
        return Quota(tenant.concurrent_jobs, tenant.queued_tokens, self._settings.max_queued_jobs, held)

    def admit_request(self, connection: HTTPConnection) -> TenantRecord:
        """Let a request in that takes no tokens, or raise; whose it is."""
        standing = self._standing(tenant_of(connection))
        tenant = standing.tenant
        if tenant.requests_per_minute is not None:
            usage, _ = self._limits.admit(tenant.name, tenant.requests_per_minute)
            self._answer(connection, standing, usage, 0)
        return tenant

    def _standing(self, name: str) -> _Standing:
        return self._standings.get(name, lambda: self._read_standing(name))

    def _read_standing(self, name: str) -> _Standing:
        tenant = self._ledger.tenants.get(name)
        return _Standing(tenant, 0 if tenant.queued_tokens is None else self._ledger.queued_tokens(name))

    def _answer(self, connection: HTTPConnection, standing: _Standing, usage: Usage, num_tokens: int) -> None:
        """Headers for what is let in, `RateLimited` for the rest."""
        headers = _headers(standing, usage)
        connection.scope["state"].setdefault(RESPONSE_HEADERS, {}).update(headers)
        tenant = standing.tenant
        if usage.refused_by == "requests":
            message = f"rate limit reached: {tenant.requests_per_minute} requests a minute"
            raise RateLimited(
                "requests", f"{message}; the next may come in {usage.retry_after:.3g} s", usage.retry_after
            )
        if usage.refused_by == "tokens" and num_tokens > (tenant.queued_tokens or 0):
            message = f"{num_tokens} tokens (prompt and max_tokens) are more than your {tenant.queued_tokens} in all"
            raise RateLimited("tokens", f"{message}: ask for less")
        if usage.refused_by == "tokens":
            queued = usage.held_tokens + standing.bulk_tokens
            message = f"{num_tokens} tokens (prompt and max_tokens) beside the {queued} you have queued"
            raise RateLimited("tokens", f"{message} are more than your {tenant.queued_tokens}", LIVE_RETRY_SECONDS)


def admission_of(connection: HTTPConnection) -> Admission:
    """For routes: `Depends(admission_of)`."""
    admission: Admission = connection.app.state.admission
    return admission


def _job_quota(request: Request) -> Quota:
    return admission_of(request).admit_job(request)


# A parameter of the routes that submit jobs: with it a request counts, and gets what its job is to be held to.
JobQuota = Annotated[Quota, Depends(_job_quota)]


def count_request(request: Request) -> None:
    """For routes that write without a job: `Depends(count_request)`."""
    admission_of(request).admit_request(request)


def _headers(standing: _Standing, usage: Usage) -> Mapping[str, str]:
    """As OpenAI names them. When tokens come free depends on the requests that hold them: their reset is not said."""
    headers: dict[str, str] = {}
    tenant = standing.tenant
    if tenant.requests_per_minute is not None:
        headers |= {
            "x-ratelimit-limit-requests": str(tenant.requests_per_minute),
            "x-ratelimit-remaining-requests": str(usage.remaining_requests),
            "x-ratelimit-reset-requests": _duration(usage.reset),
        }
    if tenant.queued_tokens is not None:
        left = tenant.queued_tokens - usage.held_tokens - standing.bulk_tokens
        headers |= {
            "x-ratelimit-limit-tokens": str(tenant.queued_tokens),
            "x-ratelimit-remaining-tokens": str(max(0, left)),
        }
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `7.66s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
