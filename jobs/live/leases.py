"""Keeps the leases of a worker's live requests, and rings for requests that nobody holds any more."""

import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from .answer import Interruption, LiveAnswer
from .claims import LeaseState, LiveClaims
from .in_flight import AnswersInFlight

logger = logging.getLogger(__name__)

# A request whose bell is older than this, while no bell waits to be heard, has lost it.
_LOST_BELL_SECONDS = 1.0


class LiveLeases:
    """`renew` and `sweep` may be called from different threads.

    `interrupt` is told which answers are not this worker's any more, or are no longer wanted.
    """

    def __init__(
        self,
        claims: LiveClaims,
        in_flight: AnswersInFlight,
        interrupt: Callable[[LiveAnswer, Interruption], None],
    ) -> None:
        self._claims = claims
        self._in_flight = in_flight
        self._interrupt = interrupt
        self._no_sweep_before = 0.0

    def renew(self) -> None:
        """Keep what is in flight, and find out what is not ours any more. Raises redis' errors."""
        answers = self._in_flight.all()
        waiting = [answer for answer in answers if not answer.has_begun]
        for answer in waiting:
            answer.is_known_to_wait = True
        try:
            states = self._claims.renew([answer.claim for answer in answers], {answer.id for answer in waiting})
            for answer in waiting:
                # Begun in the meantime.
                if answer.has_begun:
                    self._claims.begin(answer.claim)
        except RedisError:
            self._wait_for_the_others()
            raise
        for answer, state in zip(answers, states, strict=True):
            self._heed(answer, state)

    def sweep(self) -> None:
        """Ring for what dead workers held and for lost bells. Raises redis' errors."""
        if time.monotonic() < self._no_sweep_before:
            return
        try:
            lost = self._claims.sweep(_LOST_BELL_SECONDS)
            for request_id in lost:
                logger.warning("request %s has no worker, ringing for it", request_id)
            if lost:
                self._claims.ring(lost)
        except RedisError:
            self._wait_for_the_others()
            raise

    def _heed(self, answer: LiveAnswer, state: LeaseState) -> None:
        if state is LeaseState.GONE and not answer.is_over:
            self._claims.restore(answer.claim)
        elif state is LeaseState.LOST:
            answer.is_lost = True
            self._interrupt(answer, Interruption.LOST)
        elif state is LeaseState.CANCELLED:
            self._interrupt(answer, Interruption.CANCELLED)

    def _wait_for_the_others(self) -> None:
        """After an outage of Redis every worker is to have the time to renew, before any of them is taken for dead."""
        self._no_sweep_before = time.monotonic() + self._claims.lease_seconds
