"""Celery's consumer of messages, for which whatever Redis answers is one more outage to be waited out."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from celery.worker.consumer import Consumer
from kombu import Connection
from redis.exceptions import ResponseError

from ..rare_warnings import RareWarnings

logger = logging.getLogger(__name__)
_celery_logger = logging.getLogger("celery.worker.consumer.consumer")
_warnings = RareWarnings(logger)

Tell = Callable[[Exception, float], None]
_RETRY_SECONDS = 1.0
_PAUSE_SECONDS = 0.5


class PatientConsumer(Consumer):
    """Begins anew after an error answer, as Celery does after a lost connection, and is back soon after any outage.

    A failover, a full disk or memory, too few replicas: each lets a worker connect and then refuses its BRPOP.
    Wants the setting `broker_channel_error_retry`.
    """

    def ensure_connected(self, conn: Connection) -> Connection:
        # Celery leaves kombu to wait longer each time, up to half a minute in which Redis is back.
        ensure = partial(conn.ensure_connection, interval_start=_RETRY_SECONDS, interval_step=0)
        conn.ensure_connection = lambda tell, *args, **options: ensure(_told_once(tell), *args, **options)
        return super().ensure_connected(conn)

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        super().on_connection_error_before_connected(exc)
        time.sleep(_PAUSE_SECONDS)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if not isinstance(exc, ResponseError):
            super().on_connection_error_after_connected(exc)
            return
        # Celery would log twice a second, for as long as it lasts, that the connection is lost, and none of the words.
        with _without_warnings(_celery_logger):
            super().on_connection_error_after_connected(exc)
        _warnings.warn(f"Redis answers {exc}; trying again")
        # As connecting works, nothing else would slow the next try down.
        time.sleep(_PAUSE_SECONDS)


@contextmanager
def _without_warnings(muted: logging.Logger) -> Iterator[None]:
    level = muted.level
    muted.setLevel(logging.ERROR)
    try:
        yield
    finally:
        muted.setLevel(level)


def _told_once(tell: Tell) -> Tell:
    """Have each reason told once while a connection is tried again and again: Celery logs an error each time."""
    told: set[str] = set()

    def tell_news(error: Exception, interval: float) -> None:
        if str(error) in told:
            logger.debug("%s; trying again in %.2f s", error, interval)
        else:
            told.add(str(error))
            tell(error, interval)

    return tell_news
