"""Planning a large input on all cores: in this process and in helpers, the results in the input's order."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ...storage.readers import InputRow
from .batch_helper import BatchHelper, Recipe
from .batch_planner import BatchPlanner, PlannedBatch

# A helper takes a second to begin: a smaller input is done by then.
_BATCHES_ALONE = 32
_MOST_HELPERS = 7
# Results that wait for an earlier one, for each process.
_MOST_WAITING = 4
# A helper that takes so long for a batch whose turn it is hangs.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class _Begun:
    helper: BatchHelper
    rows: Sequence[InputRow]
    result: "Future[PlannedBatch]"


def plan_batches(
    planner: BatchPlanner, recipe: Recipe, batches: Iterable[Sequence[InputRow]]
) -> Generator[PlannedBatch, None, None]:
    """What `planner` makes of each batch, in order. `recipe` tells helpers how to make the same planner.

    A helper that is lost or hangs costs time only: its batches are planned here.
    """
    num_helpers = min(num_cores() - 1, _MOST_HELPERS)
    helpers: list[BatchHelper] = []
    begun: deque[_Begun | PlannedBatch] = deque()
    with ExitStack() as stack:
        for number, rows in enumerate(batches):
            if number == _BATCHES_ALONE:
                # Without room for a process this one does it alone.
                with suppress(OSError):
                    helpers += (stack.enter_context(BatchHelper(recipe)) for _ in range(num_helpers))
            free = next((helper for helper in helpers if helper.is_free), None)
            begun.append(planner.plan(rows) if free is None else _Begun(free, rows, free.plan(rows)))
            while begun and (_is_done(begun[0]) or len(begun) > _MOST_WAITING * (1 + num_helpers)):
                yield _result(planner, begun.popleft())
        while begun:
            yield _result(planner, begun.popleft())


def num_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_done(batch: _Begun | PlannedBatch) -> bool:
    return isinstance(batch, PlannedBatch) or batch.result.done()


def _result(planner: BatchPlanner, batch: _Begun | PlannedBatch) -> PlannedBatch:
    if isinstance(batch, PlannedBatch):
        return batch
    try:
        return batch.result.result(_PATIENCE_SECONDS)
    # Among them the `TimeoutError` of one that hangs.
    except (EOFError, OSError):
        batch.helper.kill()
        return planner.plan(batch.rows)
