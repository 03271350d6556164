"""Planning in processes beside one's own: `PlanningProcess` is such a process as its starter sees it."""

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from ...engine.collector import YOUNG_OBJECTS
from ...engine.text.tokenizer import Tokenizer
from ..spec.schemas import JobSpec
from .rendering import PromptRenderer
from .rows_planner import RowsPlanner
from .work import Work

Item = TypeVar("Item")
Result = TypeVar("Result")

# One is done, one waits in the helper and one on the way there: it never has to wait for its starter.
_MOST_OPEN = 3


@dataclass(frozen=True)
class Recipe:
    """What a `RowsPlanner` is made of. `spec`: the job's, as JSON. `columns`: the input's."""

    spec: str
    columns: tuple[str, ...]
    model_folder: Path
    context: int

    def planner(self) -> RowsPlanner:
        tokenizer = Tokenizer.from_pretrained(self.model_folder)
        renderer = PromptRenderer(JobSpec.model_validate_json(self.spec), tokenizer, self.columns)
        return RowsPlanner(renderer, tokenizer, self.context)


class PlanningProcess:
    """A process of our own that does work in the order given. A context manager; leaving it ends the process."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises `OSError` when the system has no room for a process."""
        self._ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())]
        # The other processes have the other cores.
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        null = subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                command, env=env, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()]
            )
        self._sending, self._receiving = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._sending.submit(self._give, recipe)
        self._ready: Future[None] = self._receiving.submit(_receive, self._ours)
        self._open: list[Future[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        # Threads that send or receive find the other end closed.
        self._sending.shutdown()
        self._receiving.shutdown()
        self._ours.close()

    def kill(self) -> None:
        """What it has not done yet fails; nothing is lost, as it has nothing that is not here too."""
        self._process.kill()
        self._process.wait()

    @property
    def is_free(self) -> bool:
        """Whether it has begun, lives, and has not enough to do."""
        if not self._ready.done() or self._ready.exception() is not None or self._process.poll() is not None:
            return False
        self._open = [result for result in self._open if not result.done()]
        return len(self._open) < _MOST_OPEN

    def do(self, work: Work[Result]) -> "Future[Result]":
        """Fails with an `OSError` or `EOFError` when the process ends before."""
        self._sending.submit(self._give, work)
        result: Future[Result] = self._receiving.submit(_receive, self._ours)
        self._open.append(result)
        return result

    def _give(self, message: object) -> None:
        with ExitStack() as stack:
            # It never answers what it never gets: the next answer would be taken for that.
            stack.callback(self._process.kill)
            _send(self._ours, message)
            stack.pop_all()


def _send(connection: Connection, message: object) -> None:
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection) -> Any:
    """Only between this process and the one it has started."""
    return pickle.loads(connection.recv_bytes())


def _serve(connection: Connection) -> None:
    recipe: Recipe = _receive(connection)
    planner = recipe.planner()
    _send(connection, None)
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    results = (_done(work, planner) for work in _received(connection))
    for _ in map_ahead(lambda result: _send(connection, result), results):
        pass


def _done(work: Work[Result], planner: RowsPlanner) -> Result:
    with ExitStack() as stack:
        # Whatever is raised, the starter meets the same. The thread that waits for more would keep us from ending.
        stack.callback(os._exit, 1)
        result = work.done_by(planner)
        stack.pop_all()
    return result


def _received(connection: Connection) -> Iterator[Work[Any]]:
    """Until the starter is gone; the next is read while the caller is busy with one."""

    def receive(_: None) -> Work[Any] | None:
        try:
            work: Work[Any] = _receive(connection)
        except (EOFError, OSError):
            return None
        return work

    for work in map_ahead(receive, repeat(None), num_ahead=1):
        if work is None:
            return
        yield work


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], num_ahead: int = 2) -> Iterator[Result]:
    """`function` of each item, in order, called in a thread of its own while the caller makes the next items.

    So many items are taken at most before the first of their results is. Raises what `function` does.
    """
    with ThreadPoolExecutor(1) as pool:
        begun: deque[Future[Result]] = deque()
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) > num_ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


if __name__ == "__main__":
    # Control-C is for the starter, which may have other plans than to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(Connection(int(sys.argv[1])))
