"""Celery's consumer of messages, for which whatever Redis answers is one more outage to be waited out."""

import logging
import time
from collections.abc import Callable
from functools import partial

from celery.worker.consumer import Consumer
from kombu import Connection
from redis.exceptions import ResponseError

logger = logging.getLogger(__name__)

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
        super().on_connection_error_after_connected(exc)
        if isinstance(exc, ResponseError):
            # Celery logs redis' repr of it, which has none of the words.
            logger.warning("Redis answers %s; trying again", exc)
            # As connecting works, nothing else would slow the next try down.
            time.sleep(_PAUSE_SECONDS)


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
