"""Ends a worker that hangs: its leases run out then, whoever supervises it starts another, its rows are tried again."""

import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from .worker_process import HUNG

if TYPE_CHECKING:
    from ..hosting.engine_host import EngineHost
    from ..shards.attempt import ShardAttempt
    from ..shards.runner import ShardRunner

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 300.0
_BEAT_SECONDS = 1.0
_BEATS_AT_LEAST = 10
# How much longer may take what may well be work: loading, compiling kernels, computing on a CPU.
_LENIENCY = 12
# Of a beat: a thread that waits takes next to nothing of a processor, one that starves takes little.
_COMPUTING = 0.01
# How long telling of it may take: what takes the log may hang as well.
_TELLING_SECONDS = 10.0
ENGINE = "engine"
_GUARD = Path(__file__).with_name("guard.py")
_NAME, _TELLER = "watchdog", "watchdog's words"


@dataclass(frozen=True)
class Look:
    """What some work is at in this moment.

    `place`: another one whenever it has got on, None while there is nothing to do. `may_take_long`: what comes once, as
    compiling kernels does. `cpu_seconds`: how long processors have computed for it, where computing shows that it is at
    work; a processor that waits for a GPU spins.
    """

    place: Hashable
    may_take_long: bool
    cpu_seconds: float = 0.0


class Watched(Protocol):
    """What a watchdog watches, from a thread of its own."""

    def look(self) -> Look: ...

    def words(self) -> str:
        """What it is at, for messages."""

    def show_others(self) -> None:
        """Have the other processes that are at it write their tracebacks to standard error."""


class Loading:
    """A worker's start, up to a model that is loaded."""

    def look(self) -> Look:
        return Look("loading", may_take_long=True, cpu_seconds=time.process_time())

    def words(self) -> str:
        return "loading the model"

    def show_others(self) -> None: ...


class EngineAtWork:
    """The thread of a worker's engine."""

    def __init__(self, host: "EngineHost") -> None:
        self._host = host

    def look(self) -> Look:
        return Look(self._host.place, not self._host.is_warm, self._host.cpu_seconds)

    def words(self) -> str:
        return self._host.words()

    def show_others(self) -> None:
        self._host.show_others()


class AttemptAtWork:
    """The thread of an attempt at a shard. What it waits for beside the engine, such as a disk, has its time."""

    def __init__(self, attempt: "ShardAttempt") -> None:
        self._attempt = attempt

    def look(self) -> Look:
        return Look(self._attempt.num_looks, may_take_long=True)

    def words(self) -> str:
        claim = self._attempt.claim
        return f"attempt {claim.attempt_number} at shard {claim.shard_id}"

    def show_others(self) -> None: ...


def works_of(host: "EngineHost", shards: "ShardRunner") -> dict[Hashable, Watched]:
    """What a worker is at, once it serves."""
    attempts: dict[Hashable, Watched] = {attempt.claim.name: AttemptAtWork(attempt) for attempt in shards.attempts}
    return {ENGINE: EngineAtWork(host), **attempts}


class Suspicion:
    """For how long some work has stood still.

    Counted in the beats of who watches, not by the clock: in a process that is stopped, or on a machine that is
    suspended, no time goes by.
    """

    def __init__(self, beat_seconds: float) -> None:
        self._beat_seconds = beat_seconds
        self._last: Look | None = None
        self.still_seconds = 0.0
        # The same, with little of the time in which it may be at work.
        self.suspected_seconds = 0.0

    def note(self, look: Look) -> None:
        """What is seen a beat after the last time."""
        last, self._last = self._last, look
        if look.place is None or last is None or look.place != last.place:
            self.still_seconds = self.suspected_seconds = 0.0
            return
        seconds = self._beat_seconds
        self.still_seconds += seconds
        if look.may_take_long:
            seconds /= _LENIENCY
        if look.cpu_seconds - last.cpu_seconds > _COMPUTING * self._beat_seconds:
            seconds /= _LENIENCY
        self.suspected_seconds += seconds


class Watchdog:
    """A thread that ends this process with status `HUNG` once any of its works has stood still for so long; 0: never.

    A context manager; at first there is but `Loading`. Loading, what else comes once, and what is not the engine's may
    take 12 times as long, and so may what a CPU computes. On Linux a process beside this one ends it where the
    interpreter itself stands still.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._beat_seconds = min(_BEAT_SECONDS, timeout_seconds / _BEATS_AT_LEAST)
        self._works: Callable[[], Mapping[Hashable, Watched]] = lambda: {ENGINE: Loading()}
        self._suspicions: dict[Hashable, Suspicion] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._leniency = _LENIENCY
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    @property
    def stalled_seconds(self) -> float:
        """For how long the engine has not got on."""
        suspicion = self._suspicions.get(ENGINE)
        return suspicion.still_seconds if suspicion is not None else 0.0

    def watch(self, works: Callable[[], Mapping[Hashable, Watched]]) -> None:
        """Instead of what was watched before: each by what it is known by, the `ENGINE` among them."""
        self._works = works

    def __enter__(self) -> Self:
        if self._timeout_seconds:
            if sys.platform == "linux":
                self._guard = _started_guard(self._timeout_seconds, self._beat_seconds)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if (guard := self._guard) is not None:
            self._thread.join()
            # Not by a word: it may have been stopped.
            with guard:
                guard.kill()

    def _run(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            self._tell_guard()
            try:
                self._look_around()
            # The thread's boundary: without a word from it the guard would end a worker that is well.
            except Exception:
                logger.exception("watchdog: looking again")

    def _look_around(self) -> None:
        works = self._works()
        # Those that are over are forgotten.
        self._suspicions = {name: self._suspicions.get(name, Suspicion(self._beat_seconds)) for name in works}
        for name, work in works.items():
            look, suspicion = work.look(), self._suspicions[name]
            suspicion.note(look)
            if name == ENGINE:
                self._leniency = _LENIENCY if look.may_take_long else 1
            if suspicion.suspected_seconds >= self._timeout_seconds:
                self._end_process(work, suspicion.still_seconds)

    def _tell_guard(self) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            # Somebody has killed or stopped it.
            with suppress(BrokenPipeError, BlockingIOError):
                self._guard.stdin.write(bytes([self._leniency]))

    def _end_process(self, work: Watched, still_seconds: float) -> None:
        teller = threading.Thread(target=_tell, args=(work, still_seconds), name=_TELLER, daemon=True)
        teller.start()
        teller.join(_TELLING_SECONDS)
        os._exit(HUNG)


def _tell(work: Watched, still_seconds: float) -> None:
    words = f"{work.words()} has not got on for {still_seconds:.0f} s"
    logger.critical("%s: what all threads are at follows", words)
    _show_threads()
    work.show_others()
    hint = "its rows are tried again by the next one; what may take longer needs a longer --watchdog-timeout"
    print(f"headrace worker: {words}: this worker ends, {hint}", file=sys.stderr, flush=True)


def _started_guard(timeout_seconds: float, beat_seconds: float) -> "subprocess.Popen[bytes]":
    arguments = (str(os.getpid()), str(timeout_seconds), str(beat_seconds))
    guard = subprocess.Popen([sys.executable, "-I", "-S", _GUARD, *arguments], stdin=subprocess.PIPE, bufsize=0)
    assert guard.stdin is not None
    os.set_blocking(guard.stdin.fileno(), False)
    return guard


def _show_threads() -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if names.get(ident) not in (_NAME, _TELLER):
            stack = "".join(traceback.format_stack(frame))
            print(f"Thread {names.get(ident, ident)} (most recent call last):\n{stack}", file=sys.stderr, flush=True)
