"""The workers' side of live requests in Redis: who may answer which, and for how long."""

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from celery import Celery
from pydantic import ValidationError
from redis.exceptions import RedisError

from ..broker.celery_app import ring_for_requests
from ..broker.redis_access import text_client
from ..rare_warnings import RareWarnings
from ..streams.keys import writer_key
from .keys import open_key, request_key
from .requests import LiveRequest, LiveState, keys_of, registration
from .scripts import BEGIN, CLAIM, END, REGISTER, RELEASE, RENEW, SWEEP

logger = logging.getLogger(__name__)

Arguments = list[str | int | float]
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


class LeaseState(StrEnum):
    """What renewing a lease finds. `GONE`: Redis does not know the request (any more), nobody else has it."""

    HELD = "held"
    CANCELLED = "cancelled"
    LOST = "lost"
    GONE = "gone"


class LiveClaims:
    """One worker's claims on one queue. Thread-safe; a context manager that closes its connections.

    Every method but `ring` raises redis' errors when Redis does not answer.
    """

    def __init__(
        self, redis_url: str, app: Celery, queue: str, owner: str, lease_seconds: float, ttl_seconds: float
    ) -> None:
        self._redis = text_client(redis_url)
        self._app = app
        self.queue = queue
        self.owner = owner
        self.lease_seconds = lease_seconds
        self._ttl_seconds = ttl_seconds
        self._warnings = RareWarnings(logger)
        self._claim, self._begin, self._renew, self._register, self._release, self._end, self._sweep = map(
            self._redis.register_script, (CLAIM, BEGIN, RENEW, REGISTER, RELEASE, END, SWEEP)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()

    def ring(self, request_ids: Sequence[str]) -> None:
        """Tell the queue's workers, this one among them, of requests that are to be had."""
        ring_for_requests(self._app, self.queue, request_ids)

    def claim_all(self, request_ids: Sequence[str]) -> list[LiveClaim]:
        """The rights that are to be had, in one step: none where a request has ended or another attempt has it.

        What cannot be read here is handed back, for other workers.
        """
        args: Arguments = [self.owner, self.lease_seconds, *request_ids]
        found: Any = self._claim(keys=[open_key(self.queue), *map(request_key, request_ids)], args=args)
        claims = [self._claimed(*each) for each in found]
        return [claim for claim in claims if claim is not None]

    def _claimed(
        self,
        request_id: str,
        attempt: int,
        num_crashes: int,
        num_failures: int,
        is_cancelled: int,
        now: str,
        spec: str,
    ) -> LiveClaim | None:
        try:
            request = LiveRequest.model_validate_json(spec)
        except ValidationError as error:
            # Of another version of ours: it must not keep the others waiting.
            self._leave(request_id, attempt, error)
            return None
        return LiveClaim(
            request, attempt, num_crashes, num_failures, bool(is_cancelled), request.deadline_at - float(now)
        )

    def _leave(self, request_id: str, attempt: int, error: ValidationError) -> None:
        """Hand back a request that cannot be read: were its lease to run out, it would be taken for a crash."""
        # What the request says is its user's.
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        self._warnings.warn(f"requests that cannot be read are left to other workers ({place}: {first['msg']})")
        with suppress(RedisError):
            self._release(keys=[request_key(request_id), open_key(self.queue)], args=[request_id, attempt, 0, 1])

    def begin(self, claim: LiveClaim) -> None:
        """Note that the engine gets a request which was renewed as waiting."""
        self._begin(keys=[request_key(claim.request.id)], args=[claim.attempt])

    def renew(self, claims: Sequence[LiveClaim], waiting: Collection[str] = ()) -> list[LeaseState]:
        """Keep what is in flight for another lease; one state a claim.

        `waiting`: the ids of requests that the engine does not have; should this worker die, they are no crash.
        """
        if not claims:
            return []
        ids = [claim.request.id for claim in claims]
        args: Arguments = [self.lease_seconds]
        for claim in claims:
            args += [claim.request.id, claim.attempt, int(claim.request.id in waiting)]
        states: Any = self._renew(keys=[open_key(self.queue), *map(request_key, ids)], args=args)
        return [LeaseState(state) for state in states]

    def restore(self, claim: LiveClaim) -> None:
        """Make a request known to a Redis that has forgotten it, as running here."""
        self._register(
            keys=keys_of(claim.request),
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
        args: Arguments = [claim.request.id, claim.attempt, int(has_failed), 0]
        return bool(self._release(keys=keys_of(claim.request)[:2], args=args))

    def end(self, claims: Iterable[LiveClaim]) -> None:
        """Note that requests have been answered, or never will be; those of other attempts by now are left alone.

        One whose streams another attempt has written, as only happens after Redis was emptied, is queued again.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            for claim in claims:
                args: Arguments = [claim.request.id, claim.attempt, self._ttl_seconds, _without_images(claim.request)]
                writers = map(writer_key, claim.request.stream_ids)
                self._end(keys=[*keys_of(claim.request), *writers], args=args, client=pipe)
            pipe.execute()

    def sweep(self, lost_seconds: float) -> list[str]:
        """The ids to ring for: those whose lease ran out and, unless bells still wait, those nobody was told of."""
        args: Arguments = [request_key(""), lost_seconds, _SWEEP_REQUESTS, self.owner]
        # Bells have the highest priority, whose list has the queue's own name.
        rung: Any = self._sweep(keys=[open_key(self.queue), self.queue], args=args)
        return list(rung)


def _without_images(request: LiveRequest) -> str:
    """The spec of a request that has ended: nobody needs megabytes of it. Empty where it has none."""
    if not request.images:
        return ""
    return request.model_copy(update={"images": ()}).model_dump_json(exclude_defaults=True)
