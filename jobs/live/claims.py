"""The workers' side of live requests in Redis: who may answer which, and for how long."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import ValidationError
from redis import Redis

from .keys import open_key, request_key, tenant_key
from .requests import LiveRequest, LiveState, registration
from .scripts import BEGIN, CLAIM, END, REGISTER, RELEASE, RENEW, SWEEP

logger = logging.getLogger(__name__)

Arguments = list[str | int | float]
_REDIS_SECONDS = 5.0
_SWEEP_REQUESTS = 1000


@dataclass(frozen=True)
class LiveClaim:
    """A worker's right to answer a request, until its lease ends.

    `num_crashes` and `num_failures`: how many attempts before this one ended with their worker, and how many in an
    engine failure. `seconds_left`: until the deadline, when the claim was made.
    """

    request: LiveRequest
    attempt: int
    num_crashes: int
    num_failures: int
    is_cancelled: bool
    seconds_left: float


class Verdict(StrEnum):
    """What renewing a lease finds. `GONE`: Redis does not know the request (any more), nobody else has it."""

    HELD = "held"
    CANCELLED = "cancelled"
    LOST = "lost"
    GONE = "gone"


class LiveClaims:
    """One worker's claims on one queue. Thread-safe; a context manager that closes its connections.

    Every method raises redis' errors when Redis does not answer.
    """

    def __init__(self, redis_url: str, queue: str, owner: str, lease_seconds: float, ttl_seconds: float) -> None:
        self._redis: Redis = Redis.from_url(
            redis_url, decode_responses=True, socket_timeout=_REDIS_SECONDS, socket_connect_timeout=_REDIS_SECONDS
        )
        self.queue = queue
        self.owner = owner
        self.lease_seconds = lease_seconds
        self._ttl_seconds = ttl_seconds
        self._claim, self._begin, self._renew, self._register, self._release, self._end, self._sweep = map(
            self._redis.register_script, (CLAIM, BEGIN, RENEW, REGISTER, RELEASE, END, SWEEP)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()

    def claim(self, request_id: str) -> LiveClaim | None:
        """The right to answer a request; None when it has ended or another attempt has it."""
        return next(iter(self.claim_all([request_id])), None)

    def claim_all(self, request_ids: Sequence[str]) -> list[LiveClaim]:
        """The rights that are to be had, in few round trips."""
        # One by itself: a pipeline asks first whether Redis knows the script.
        answers: Any = [self._ask(request_id, self._redis) for request_id in request_ids[:1]]
        if len(request_ids) > 1:
            with self._redis.pipeline(transaction=False) as pipe:
                for request_id in request_ids[1:]:
                    self._ask(request_id, pipe)
                answers += pipe.execute()
        claims = (self._claimed(found) for found in answers if found[0] == "claimed")
        return [claim for claim in claims if claim is not None]

    def _ask(self, request_id: str, client: Any) -> Any:
        args: Arguments = [request_id, self.owner, self.lease_seconds]
        return self._claim(keys=[request_key(request_id), open_key(self.queue)], args=args, client=client)

    @staticmethod
    def _claimed(found: Any) -> LiveClaim | None:
        _, attempt, num_crashes, num_failures, is_cancelled, now, spec = found
        try:
            request = LiveRequest.model_validate_json(spec)
        except ValidationError as error:
            # Of another version of ours: it must not keep the others waiting.
            logger.warning("a live request can not be read: %s", error)
            return None
        return LiveClaim(
            request, attempt, num_crashes, num_failures, bool(is_cancelled), request.deadline_at - float(now)
        )

    def begin(self, claim: LiveClaim) -> None:
        """Note that the engine gets a request which was renewed as waiting."""
        self._begin(keys=[request_key(claim.request.id)], args=[claim.attempt])

    def renew(self, claims: Sequence[LiveClaim], waiting: Collection[str] = ()) -> list[Verdict]:
        """Keep what is in flight for another lease; one verdict a claim.

        `waiting`: the ids of requests that the engine does not have; should this worker die, they are no crash.
        """
        if not claims:
            return []
        ids = [claim.request.id for claim in claims]
        args: Arguments = [self.lease_seconds]
        for claim in claims:
            args += [claim.request.id, claim.attempt, int(claim.request.id in waiting)]
        verdicts: Any = self._renew(keys=[open_key(self.queue), *map(request_key, ids)], args=args)
        return [Verdict(verdict) for verdict in verdicts]

    def restore(self, claim: LiveClaim) -> None:
        """Make a request known to a Redis that has forgotten it, as running here."""
        self._register(
            keys=_keys(claim.request),
            args=registration(
                claim.request,
                self._ttl_seconds,
                LiveState.RUNNING,
                claim.attempt,
                self.owner,
                self.lease_seconds,
                claim.num_crashes,
                claim.num_failures,
            ),
        )

    def release(self, claim: LiveClaim, has_failed: bool) -> bool:
        """Hand a request back, for another attempt; false when it was not this attempt's any more."""
        args: Arguments = [claim.request.id, claim.attempt, int(has_failed)]
        return bool(self._release(keys=_keys(claim.request)[:2], args=args))

    def end(self, claims: Iterable[LiveClaim]) -> None:
        """Note that requests have been answered, or never will be; those of other attempts by now are left alone."""
        with self._redis.pipeline(transaction=False) as pipe:
            for claim in claims:
                args: Arguments = [claim.request.id, claim.attempt, self._ttl_seconds]
                self._end(keys=_keys(claim.request), args=args, client=pipe)
            pipe.execute()

    def sweep(self, lost_seconds: float, bells_wait: bool) -> list[str]:
        """The ids to ring for: those whose lease ran out and, unless bells still wait, those nobody was told of."""
        args: Arguments = [request_key(""), lost_seconds, int(bells_wait), _SWEEP_REQUESTS]
        rung: Any = self._sweep(keys=[open_key(self.queue)], args=args)
        return list(rung)


def _keys(request: LiveRequest) -> list[str]:
    return [request_key(request.id), open_key(request.queue), tenant_key(request.tenant)]
