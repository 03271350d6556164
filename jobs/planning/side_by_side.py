"""Planning a large input on all cores: in this process and in helpers, the results in the order of the work."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from ...storage.readers import InputRow
from ..processes import num_cores
from .planning_process import PlanningProcess, Recipe
from .rows_planner import PlannedRun, RowsPlanner
from .work import PlanRows, Work

Result = TypeVar("Result")

# A helper takes a second to begin: a smaller input is planned by then.
_RUNS_ALONE = 32
_MOST_HELPERS = 7
# Results that wait for an earlier one, for each process.
_MOST_WAITING = 4
# A helper that takes so long for work whose turn it is hangs.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class _Begun(Generic[Result]):
    """Work that a helper does."""

    helper: PlanningProcess
    work: Work[Result]
    result: "Future[Result]"

    @property
    def is_done(self) -> bool:
        return self.result.done()


@dataclass(frozen=True)
class _Done(Generic[Result]):
    result: Result
    is_done = True


class SideBySide:
    """A context manager; leaving it ends the helpers. `recipe` tells them how to make the same `planner`.

    A helper that is lost or hangs costs time only: its work is done here.
    """

    def __init__(self, planner: RowsPlanner, recipe: Recipe) -> None:
        self._planner = planner
        self._recipe = recipe
        self._num_helpers = min(num_cores() - 1, _MOST_HELPERS)
        self._helpers: list[PlanningProcess] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end_helpers()

    def end_helpers(self) -> None:
        """What they have not done is lost."""
        self._helpers = []
        self._stack.close()

    def plan(self, runs: Iterable[Sequence[InputRow]]) -> Iterator[PlannedRun]:
        """What the planner makes of each run, in order. The helpers begin once there are many."""
        return self.results(self._plans(runs))

    def _plans(self, runs: Iterable[Sequence[InputRow]]) -> Iterator[PlanRows]:
        for number, rows in enumerate(runs):
            if number == _RUNS_ALONE:
                self._begin_helpers()
            yield PlanRows(rows)

    def _begin_helpers(self) -> None:
        # Without room for a process this one does it alone.
        with suppress(OSError):
            for _ in range(self._num_helpers):
                self._helpers.append(self._stack.enter_context(PlanningProcess(self._recipe)))

    def results(self, works: Iterable[Work[Result]]) -> Iterator[Result]:
        """What each work gives, in order. Raises what doing it here does."""
        begun: deque[_Begun[Result] | _Done[Result]] = deque()
        for work in works:
            begun.append(self._begun(work))
            while begun and (begun[0].is_done or len(begun) > _MOST_WAITING * (1 + self._num_helpers)):
                yield self._result(begun.popleft())
        while begun:
            yield self._result(begun.popleft())

    def _begun(self, work: Work[Result]) -> _Begun[Result] | _Done[Result]:
        free = next((helper for helper in self._helpers if helper.is_free), None)
        return _Done(work.done_by(self._planner)) if free is None else _Begun(free, work, free.do(work))

    def _result(self, begun: _Begun[Result] | _Done[Result]) -> Result:
        if isinstance(begun, _Done):
            return begun.result
        try:
            return begun.result.result(_PATIENCE_SECONDS)
        # Among them the `TimeoutError` of one that hangs.
        except (EOFError, OSError):
            begun.helper.kill()
            return begun.work.done_by(self._planner)
