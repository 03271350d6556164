"""An engine host over the fake runner, which a test can hold up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Outcome

from ..engine.fakes import FakeRunner, fake_engine

BLOCK_SIZE = 4
NUM_BLOCKS = 64
WAIT_SECONDS = 60.0


class GatedRunner(FakeRunner):
    """Computes a step for each permit, or freely once `open` was called. `fail`: every step raises this."""

    def __init__(self, num_states: int = 0) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, num_states=num_states)
        self.is_open = True
        self.fail: Exception | None = None
        self.num_sequences_started = 0
        self.reached = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)

    def execute(self, batch: Batch) -> Tensor:
        self.reached.release()
        if not self.is_open:
            self._permits.acquire()
        if self.fail is not None:
            raise self.fail
        context_lens, query_lens = batch.attention.context_lens, batch.attention.query_lens
        self.num_sequences_started += sum(map(int.__eq__, map(int, context_lens), map(int, query_lens)))
        return super().execute(batch)

    def close(self) -> None:
        self.is_open = False

    def permit(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self.is_open = True
        self._permits.release()

    def wait_until_reached(self) -> None:
        """Until a step stands at the gate."""
        assert self.reached.acquire(timeout=WAIT_SECONDS), "no step came"


@contextmanager
def hosted(
    runner: GatedRunner, max_num_seqs: int = 8, enable_prefix_caching: bool = False
) -> Iterator[tuple[EngineHost, Engine]]:
    """A running host, and its engine for a look once it has ended."""
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, enable_prefix_caching=enable_prefix_caching)
    engine = fake_engine(runner, config)
    with EngineHost(engine) as host:
        try:
            yield host, engine
        finally:
            runner.open()
    engine.check()


def take(outcomes: "SimpleQueue[Outcome]", count: int) -> dict[str, Outcome]:
    """The next `count` outcomes by their request."""
    taken = [outcomes.get(timeout=WAIT_SECONDS) for _ in range(count)]
    assert len({outcome.request_id for outcome in taken}) == count
    return {outcome.request_id: outcome for outcome in taken}
