"""CUDA graphs: what was launched while they were captured, done again with the very same memory."""

from functools import partial
from typing import Any

from .captures import Capture
from .memory import Memory, Pool, poison
from .streams import Stream, Timeline


class Graph:
    """As `torch.cuda.CUDAGraph`; `torch.cuda.graph` is torch's own."""

    def __init__(self, timeline: Timeline, memory: Memory) -> None:
        self._timeline, self._memory = timeline, memory
        self._captured: Capture | None = None
        self._pool: Pool | None = None
        self._has_ended = False
        # Stands for the graph where nothing is to keep it alive.
        self._token = object()

    def capture_begin(self, pool: Pool | None = None, **_: Any) -> None:
        assert self._timeline.capture is None, "another capture is under way"
        assert self._timeline.current is not self._timeline.default, "the default stream cannot be captured"
        self._pool = pool or self._memory.new_pool()
        self._memory.begin_allocate_to_pool(self._pool)
        self._captured = self._timeline.capture = Capture(self._timeline.current)
        self._memory.capturing = (self._token, self._pool)

    def capture_end(self) -> None:
        capture, self._timeline.capture = self._timeline.capture, None
        self._memory.capturing = None
        assert capture is not None
        if capture.is_broken or not capture.is_joined:
            # As torch does, which leaves its allocator waiting for the end.
            reason = "due to a previous error during capture" if capture.is_broken else "unjoined work"
            raise RuntimeError(f"CUDA error: operation failed {reason}")
        self._has_ended = True
        self._memory.end_allocate_to_pool(0, self.pool())

    def pool(self) -> Pool:
        if self._pool is None or not self._has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        self._timeline.refuse_in_capture("replay")
        assert self._captured is not None
        for owner, content in self.pool().freed:
            if owner is not self._token:
                # Any graph of the pool writes into it.
                self._timeline.launch(partial(poison, content))
        self._captured.replay(self._timeline, lambda: Stream(self._timeline))

    def __del__(self) -> None:
        if self._has_ended:
            self._memory.release_pool(0, self.pool())
