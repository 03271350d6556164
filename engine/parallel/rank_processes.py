"""The processes of the ranks but the first: started, told what to do, watched, and ended with this one."""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import torch

from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from ..errors import ConfigError, EngineDeadError, EngineError, one_line
from .messages import SHOW, Begin, Failed, Loaded, Order, Task
from .rendezvous import Rendezvous

logger = logging.getLogger(__name__)

_MODULE = f"{__package__}.rank_process"
# How long this process waits to hear which rank it was, where it sees that one is gone, and for ranks to end.
_DIAGNOSIS_SECONDS = 10.0
_END_SECONDS = 5.0
# How long they have to write what they are at.
_SHOW_SECONDS = 1.0
# How long the engine's thread has to come upon a death by itself, where it may wait for the dead for ever.
_NOTICE_SECONDS = 10.0


class _Rank(NamedTuple):
    number: int
    process: "subprocess.Popen[bytes]"
    connection: Connection


class RankProcesses:
    """Ranks 1 to `config.world_size` - 1. A thread starts them and watches them until `close`.

    Once one of them is gone, or a step has failed, nothing is computed any more: every call raises `EngineDeadError`.
    On GPUs a thread that waits for what the ranks compute together never comes back then: this process ends.
    `is_computing`: whether a thread may be doing so.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self._meeting_place = Rendezvous()
        self.rendezvous = self._meeting_place.file
        self._tasks = [Task(rank, model_config, config, self.rendezvous) for rank in range(1, config.world_size)]
        self._ranks: list[_Rank] = []
        self._death: EngineError | None = None
        self._num_loaded = 0
        self._is_closing = False
        self._may_hang = config.device == "cuda"
        self._is_noticed = False
        self._have_begun = False
        self.is_computing = False
        self._pid = os.getpid()
        # Told of a death and of ranks that have loaded.
        self._news = threading.Condition()
        self._when_dead: list[Callable[[str], None]] = []
        # The system ends them with the thread that started them: one that lives as long as this process.
        self._watcher = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._are_started = threading.Event()
        self._watcher.start()
        try:
            self._are_started.wait()
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Wait until all have read their weights, and let them begin, which is to compute together.

        Raises `ConfigError` with what one of them cannot be loaded for, or `EngineDeadError`.
        """
        with self._news:
            self._news.wait_for(lambda: self._death is not None or self._num_loaded == len(self._tasks))
        self._have_begun = self.is_computing = True
        self.tell(Begin())

    def tell(self, order: Order | Begin) -> None:
        """Send all of them an order; they carry out one after the other."""
        self._require_life()
        try:
            self._send(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self.fail(error) from error

    def tell_each(self, orders: Iterable[Order]) -> None:
        """Send each of them an order of its own, one after the other from rank 1 on."""
        self._require_life()
        try:
            for rank, order in zip(self._ranks, orders, strict=True):
                rank.connection.send_bytes(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self.fail(error) from error

    def fail(self, error: Exception) -> EngineError:
        """Nothing can be computed any more, by reason of this error or of a rank that is gone: what to raise."""
        with self._news:
            self._news.wait_for(lambda: self._death is not None, _DIAGNOSIS_SECONDS)
        self._notice()
        return self._die(f"a step failed on rank 0, which leaves the ranks at odds: {one_line(error)}")

    def call_when_dead(self, function: Callable[[str], None]) -> None:
        """Have it called once with what happened, in any thread; at once where it has happened already."""
        with self._news:
            self._when_dead.append(function)
            death = self._death
        if death is not None:
            function(str(death))

    def show(self) -> None:
        """Have them write what their threads are at to standard error, and give them the time."""
        for rank in self._ranks:
            logger.critical("rank %d is process %d", rank.number, rank.process.pid)
            rank.process.send_signal(SHOW)
        time.sleep(_SHOW_SECONDS)

    def close(self) -> None:
        """End the processes, those that do not of themselves by force. May be called twice."""
        # What a fork of this process has at its end is not its own.
        if os.getpid() != self._pid:
            return
        with self._news:
            if self._is_closing:
                return
            self._is_closing = True
            self._death = self._death or EngineDeadError("the engine is closed")
            self._news.notify_all()
        self._end_all()
        self._meeting_place.remove()

    def _require_life(self) -> None:
        if self._death is not None:
            self._notice()
            raise self._death

    def _notice(self) -> None:
        with self._news:
            self._is_noticed = True
            self._news.notify_all()

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            rank.connection.send_bytes(message)

    def _run(self) -> None:
        try:
            for task in self._tasks:
                self._ranks.append(_started(task))
        # The boundary of this thread: who waits for it hears of it.
        except Exception as error:
            logger.exception("a rank cannot be started")
            self._die(f"no process for a rank: {one_line(error)}")
            return
        finally:
            self._are_started.set()
        self._watch(self._ranks)

    def _watch(self, ranks: Sequence[_Rank]) -> None:
        left = list(ranks)
        while left and (self._death is None or self._is_closing):
            ready = wait([rank.connection for rank in left])
            heard = [(rank, _news_of(rank)) for rank in left if rank.connection in ready]
            # First the one that is gone: it may be why others fail.
            for rank, news in sorted(heard, key=lambda each: each[1] is not None):
                if news is None:
                    left.remove(rank)
                    self._note_end(rank)
                else:
                    self._take_in(rank, news)

    def _note_end(self, rank: _Rank) -> None:
        # Waited for here: were this thread to end before them, the system would kill them.
        end = _end_of(rank.process)
        if not self._is_closing:
            self._die(f"rank {rank.number} (process {rank.process.pid}) {end}")

    def _take_in(self, rank: _Rank, news: Loaded | Failed) -> None:
        if isinstance(news, Failed):
            message = f"rank {rank.number} of the model: {news.message}"
            self._die(message, ConfigError if news.is_config else EngineDeadError)
            return
        with self._news:
            self._num_loaded += 1
            self._news.notify_all()

    def _die(self, message: str, kind: type[EngineError] = EngineDeadError) -> EngineError:
        with self._news:
            if self._death is not None:
                return self._death
            death = self._death = kind(message)
            functions = list(self._when_dead)
            self._news.notify_all()
        logger.error("the engine is dead: %s", message)
        # The others may wait for the one that is gone.
        for rank in self._ranks:
            rank.process.kill()
        self._meeting_place.remove()
        for function in functions:
            function(message)
        if self._may_hang:
            self._end_unless_noticed()
        return death

    def _end_unless_noticed(self) -> None:
        with self._news:
            is_noticed = self._news.wait_for(lambda: self._is_noticed or self._is_closing, _NOTICE_SECONDS)
        if not is_noticed and self._waits_for_ever():
            logger.critical("this process ends: it waits for what never comes")
            os._exit(1)

    def _waits_for_ever(self) -> bool:
        """Else it reads weights or is at rest, and comes upon the death by itself."""
        return self._have_begun and (self.is_computing or not torch.cuda.default_stream().query())

    def _end_all(self) -> None:
        for rank in self._ranks:
            # Not closed: the watcher reads from it.
            with suppress(OSError), socket.socket(fileno=os.dup(rank.connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_WR)
            if self._num_loaded < len(self._tasks):
                # Reading weights, nobody listens.
                rank.process.kill()
        deadline = time.monotonic() + _END_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()


def _started(task: Task) -> _Rank:
    ours, theirs = Pipe()
    with theirs:
        # -P: what lies in the working folder is nothing to import.
        command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    ours.send(task)
    return _Rank(task.rank, process, ours)


def _news_of(rank: _Rank) -> Loaded | Failed | None:
    """What it says; None when it has nothing more to say."""
    try:
        news: Loaded | Failed = rank.connection.recv()
    except (EOFError, OSError):
        return None
    return news


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    """How it ended, in words."""
    try:
        status = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if status < 0:
        hint = ": is the machine out of memory?" if status == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{hint}"
    return f"ended with status {status}"
