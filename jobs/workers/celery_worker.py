"""Celery's worker, in the main thread of ours: which queues it listens to, and how it ends."""

import logging
import signal
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from celery import Celery, bootsteps, signals
from celery.apps.worker import Worker
from celery.concurrency.thread import ApplyResult, TaskPool
from celery.exceptions import SecurityWarning
from celery.worker import state as worker_state
from kombu.asynchronous.hub import Hub
from kombu.message import Message
from kombu.messaging import Consumer

from ..broker.celery_app import kombu_queue
from .celery_consumer import PatientConsumer

logger = logging.getLogger(__name__)

# Of a task: whether it has failed, what it has returned, and how many seconds it took.
_Ended = tuple[bool, Any, float]


@dataclass(frozen=True)
class Bells:
    """A queue whose messages name interactive requests, and who is told of each: in the event loop, so at once."""

    queue: str
    on_ring: Callable[[str], None]


def run_worker(
    app: Celery,
    queues: Sequence[str],
    concurrency: int,
    on_shutdown: Callable[[], None],
    bells: Bells | None = None,
) -> int:
    """Consume the queues in this (main) thread until SIGTERM or SIGINT; returns the exit status.

    Tasks run in `concurrency` threads. When told to stop, takes no more messages, calls `on_shutdown` once in
    this thread (it is to make running tasks return soon) and waits for them. A second SIGINT ends the process
    at once. Redis going away, even for long, ends nothing, nor does any error that it answers.
    """
    signals.setup_logging.connect(_leave_logging_alone)
    # Its advice against root is about pickled messages, which are refused anyway.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app.conf.task_queues = [kombu_queue(name) for name in queues]
    if bells is not None:
        app.steps["consumer"].add(_bell_step(bells))
    with _signal_arrivals() as arrivals:
        worker = _Worker(
            app=app,
            pool_cls=_WakingThreadPool,
            consumer_cls=PatientConsumer,
            concurrency=concurrency,
            arrivals=arrivals,
            on_shutdown=on_shutdown,
            quiet=True,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        worker.start()
    return int(worker.exitcode or 0)


def _bell_step(bells: Bells) -> type[bootsteps.ConsumerStep]:
    """Listens to a queue beside the tasks', on a channel of its own.

    A channel asks Redis for the next message only while its worker has room, and what it has asked for it cannot take
    back. So one channel for both queues would have to leave the tasks' out while every thread is busy, and would then
    notice a free thread late.
    """

    class BellStep(bootsteps.ConsumerStep):
        def get_consumers(self, channel: Any) -> list[Consumer]:
            return [Consumer(channel, [kombu_queue(bells.queue)], no_ack=True, callbacks=[self.hear], accept=["json"])]

        def hear(self, body: Any, message: Message) -> None:
            # A text alone is what producers of an older version send.
            request_ids = [body] if isinstance(body, str) else body
            if isinstance(request_ids, list) and all(isinstance(each, str) for each in request_ids):
                for request_id in request_ids:
                    bells.on_ring(request_id)
            else:
                logger.warning("%s: no requests' ids: %.100r", bells.queue, body)

    return BellStep


def _leave_logging_alone(**_: Any) -> None:
    """Keep Celery from configuring the root logger: having a receiver of `setup_logging` is enough."""


class _WakingThreadPool(TaskPool):
    """Celery's thread pool, telling the event loop at once that a thread is free.

    The loop itself would notice only when its poll times out, after up to a second of an idle thread. And of a thread
    in which Celery's own code fails, as where it can open no file, nobody would be told at all: as many times as there
    are threads, and a worker that seems well takes no task any more.
    """

    def register_with_event_loop(self, loop: Hub) -> None:
        self._loop = loop

    def on_apply(self, *args: Any, callback: Callable[[_Ended], None], **kwargs: Any) -> ApplyResult:
        result = super().on_apply(*args, callback=callback, **kwargs)
        result.f.add_done_callback(partial(_release, callback))
        result.f.add_done_callback(lambda _: self._loop.call_soon(_nothing))
        return result


def _release(callback: Callable[[_Ended], None], ended: "Future[None]") -> None:
    """Have a task that Celery has failed over taken for done: what has come of it the ledger knows."""
    if not ended.cancelled() and (error := ended.exception()) is not None:
        logger.error("Celery failed over a task: %s: %s", type(error).__name__, error)
        callback((False, None, 0.0))


def _nothing() -> None:
    """Give the event loop a reason to go round."""


class _Worker(Worker):
    def __init__(self, arrivals: socket.socket, on_shutdown: Callable[[], None], **options: Any) -> None:
        self._arrivals = arrivals
        self._on_shutdown = on_shutdown
        super().__init__(**options)

    def install_platform_tweaks(self, worker: Worker) -> None:
        """Replace Celery's signal handlers: they print to stdout, and SIGHUP would start argv anew."""
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)

    def register_with_event_loop(self, hub: Hub) -> None:
        super().register_with_event_loop(hub)
        hub.add_reader(self._arrivals, self._arrivals.recv, 64)

    def on_close(self) -> None:
        self._on_shutdown()
        super().on_close()


def _stop(signum: int, frame: FrameType | None) -> None:
    worker_state.should_stop = 0
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _signal_arrivals() -> Iterator[socket.socket]:
    """A socket that becomes readable when a signal arrives: Python resumes an interrupted poll by itself."""
    arrivals, notify = socket.socketpair()
    with arrivals, notify:
        arrivals.setblocking(False)
        notify.setblocking(False)
        former = signal.set_wakeup_fd(notify.fileno(), warn_on_full_buffer=False)
        try:
            yield arrivals
        finally:
            signal.set_wakeup_fd(former)
