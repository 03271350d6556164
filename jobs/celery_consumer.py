"""Celery's consumer of messages, for which whatever Redis answers is one more outage to be waited out."""

import logging
import time
from functools import partial

from celery.worker.consumer import Consumer
from kombu import Connection
from redis.exceptions import ResponseError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_PAUSE_SECONDS = 0.5


class PatientConsumer(Consumer):
    """Begins anew after an error answer, as Celery does after a lost connection, and is back soon after any outage.

    A failover, a full disk or memory, too few replicas: each lets a worker connect and then refuses its BRPOP.
    Wants the setting `broker_channel_error_retry`.
    """

    def ensure_connected(self, conn: Connection) -> Connection:
        # Celery leaves kombu to wait longer each time, up to half a minute in which Redis is back.
        conn.ensure_connection = partial(conn.ensure_connection, interval_start=_RETRY_SECONDS, interval_step=0)
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
