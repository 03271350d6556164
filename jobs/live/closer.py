"""The thread that waits until what an ended request has brought is written before Redis is told of its end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from redis.exceptions import RedisError

from ..streams.publisher import StreamPublisher
from .answer import LiveAnswer
from .claims import LiveClaims
from .in_batches import InBatches

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0


@dataclass(frozen=True)
class Closing:
    """An answer that is over: ended, or to be handed back once what it has brought is written."""

    answer: LiveAnswer
    hands_back: bool = False
    has_failed: bool = False


class Closer:
    """A context manager; `close` is thread-safe. `on_closed` is told, in its thread, of each that Redis knows of."""

    def __init__(self, claims: LiveClaims, publisher: StreamPublisher, on_closed: Callable[[LiveAnswer], None]) -> None:
        self._claims = claims
        self._publisher = publisher
        self._on_closed = on_closed
        self._to_close: list[Closing] = []
        self._closings = InBatches[Closing]("live ends", self._close_all)

    def __enter__(self) -> Self:
        self._closings.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closings.__exit__(*exc_info)

    def close(self, closing: Closing) -> None:
        """Returns at once."""
        self._closings.put(closing)

    def _close_all(self, closings: list[Closing]) -> None:
        self._to_close += closings
        # Whoever learns that a request has ended must find its whole stream.
        if not self._to_close or not self._publisher.flush(_FLUSH_SECONDS, hurry=False):
            return
        ended = [closing.answer for closing in self._to_close if not closing.hands_back]
        try:
            self._claims.end([answer.claim for answer in ended])
            for answer in ended:
                self._on_closed(answer)
            self._to_close = [closing for closing in self._to_close if closing.hands_back]
            while self._to_close:
                self._give_back(self._to_close[0])
                self._to_close.pop(0)
        except RedisError as error:
            logger.warning("%d requests wait to be closed: %s", len(self._to_close), error)

    def _give_back(self, closing: Closing) -> None:
        answer = closing.answer
        is_ours = self._claims.release(answer.claim, closing.has_failed)
        # Before the bell, which may be answered here.
        self._on_closed(answer)
        if is_ours:
            self._claims.ring([answer.id])
