"""The workers of one model on this host, each started again whenever it dies."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .kept_worker import KeptWorker

logger = logging.getLogger(__name__)


def names_of_workers(name: str, num_workers: int) -> list[str]:
    """What tells a model's workers apart, in logs."""
    return [name] if num_workers == 1 else [f"{name} #{number}" for number in range(1, num_workers + 1)]


class KeptWorkers:
    """Runs a `headrace worker` with `options` for each of `places`, what it has in its environment beside ours.

    Each line that one of them writes is passed to `on_line` with its name; `on_refusal` is told why they refuse to run
    once all do. Both are called in threads of this object's own.
    """

    def __init__(
        self,
        name: str,
        options: Sequence[str],
        places: Sequence[Mapping[str, str]],
        on_line: Callable[[str, str], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        self._on_refusal = on_refusal
        self._num_left = len(places)
        self._lock = threading.Lock()
        self._workers = [
            KeptWorker(each, options, partial(on_line, each), partial(self._refused, each), {**os.environ, **place})
            for each, place in zip(names_of_workers(name, len(places)), places, strict=True)
        ]

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def _refused(self, name: str, reason: str) -> None:
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._on_refusal(reason)
        else:
            # It has said why.
            logger.error("%s refuses to run: it is not started again", name)

    @classmethod
    def stop(cls, groups: "Sequence[KeptWorkers]") -> None:
        """Of all groups at once; returns when they have handed back what they have not finished and are gone."""
        workers = [worker for group in groups for worker in group._workers]
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(KeptWorker.stop, workers))
