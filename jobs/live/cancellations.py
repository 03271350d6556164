"""Live requests that nobody waits for any more: called off, also where Redis takes nothing in for a while."""

import logging
import time
from collections.abc import Iterable
from typing import Self

from redis.exceptions import RedisError

from ..rare_warnings import RareWarnings
from .in_batches import InBatches
from .requests import LiveRequest, LiveRequests

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_MOST_KEPT = 10_000


class Cancellations:
    """A context manager, which tries once more before it ends; `add` is thread-safe and returns at once.

    Clients ask again what was not answered, and both would be computed. What Redis refuses to call off is kept until it
    does or the deadline has passed, and not more than there is room for.
    """

    def __init__(self, requests: LiveRequests) -> None:
        self._requests = requests
        # By request, those that have waited longest first.
        self._deadlines: dict[str, float] = {}
        self._warnings = RareWarnings(logger)
        self._added = InBatches[LiveRequest]("live cancellations", self._cancel_all, _RETRY_SECONDS)

    def __enter__(self) -> Self:
        self._added.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._added.__exit__(*exc_info)

    def add(self, requests: Iterable[LiveRequest]) -> None:
        """Have requests end soon."""
        for request in requests:
            self._added.put(request)

    def _cancel_all(self, added: list[LiveRequest]) -> None:
        self._deadlines |= {request.id: request.deadline_at for request in added}
        try:
            for request_id, deadline_at in list(self._deadlines.items()):
                if deadline_at > time.time():
                    self._requests.cancel(request_id)
                del self._deadlines[request_id]
        except RedisError as error:
            self._warnings.warn(f"{len(self._deadlines)} requests are not called off yet: {error}")
            self._deadlines = dict(list(self._deadlines.items())[-_MOST_KEPT:])
