"""Streams that compute as late as they may, and events in them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .captures import Capture

Work = Callable[[], object]
_readings = count(1)


@dataclass(frozen=True)
class Mark:
    """A moment in a stream: when its first `number` works are done."""

    stream: "Stream"
    number: int

    @property
    def is_past(self) -> bool:
        return self.stream.num_done >= self.number


class Stream:
    """Work in the order launched; none of it is done before something asks for it."""

    device = torch.device("cuda", 0)
    device_index = 0

    def __init__(self, timeline: "Timeline") -> None:
        self._timeline = timeline
        self._queue: deque[Work | Mark] = deque()
        self._num_launched = self.num_done = 0
        timeline.streams.append(self)

    def launch(self, work: Work | Mark) -> None:
        self._queue.append(work)
        self._num_launched += 1

    @property
    def end(self) -> Mark:
        return Mark(self, self._num_launched)

    def reach(self, number: int) -> None:
        """Do the first `number` works, and what they have to wait for."""
        while self.num_done < number:
            self._timeline.run_ahead()
            if self.num_done < number:
                self._do_next()

    def run_ahead(self) -> None:
        """Do whatever waits for no other stream."""
        while self._queue and (not isinstance(self._queue[0], Mark) or self._queue[0].is_past):
            self._do_next()

    def _do_next(self) -> None:
        work = self._queue.popleft()
        if isinstance(work, Mark):
            work.stream.reach(work.number)
        else:
            work()
        self.num_done += 1

    # What follows is named as torch names it.

    def record_event(self) -> "Event":
        event = Event(self._timeline)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        capture = self._timeline.capture
        if capture is not None and (event in capture.recorded or self in capture.streams):
            capture.wait(self, event)
        elif event.mark is not None:
            self.launch(event.mark)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._timeline.wait_for(self.end, "Stream.synchronize")


class Event:
    def __init__(self, timeline: "Timeline", **_: Any) -> None:
        self._timeline = timeline
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream, capture = stream or self._timeline.current, self._timeline.capture
        if capture is not None and stream in capture.streams:
            capture.record(stream, self)
        else:
            self.mark = stream.end

    def synchronize(self) -> None:
        if self.mark is not None:
            self._timeline.wait_for(self.mark, "Event.synchronize")

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds, each time more than before: who takes what one thing takes off another's has some left.

        Of what passes here nothing is to be learned.
        """
        return float(next(_readings))


class Timeline:
    """All streams, and where the host is among them.

    `is_hasty`: while one stream computes the others do all that nothing holds back; else they do only what is waited
    for. Either is a GPU's right. `waits`: what made the host wait, in order. `fault`: what a work has raised; whoever
    waits from then on hears of it, and nothing more is computed.
    """

    def __init__(self, is_hasty: bool) -> None:
        self._is_hasty = is_hasty
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self)
        self.waits: list[str] = []
        self.capture: Capture | None = None
        self.fault: RuntimeError | None = None

    def launch(self, work: Work, stream: Stream | None = None) -> None:
        stream = stream or self.current
        if self.capture is not None and stream in self.capture.streams:
            self.capture.launch(stream, work)
        else:
            stream.launch(work)

    @property
    def is_capturing(self) -> bool:
        return self.capture is not None and self.current in self.capture.streams

    def wait(self, why: str) -> None:
        """Let the host wait for the current stream."""
        self.wait_for(self.current.end, why)

    def wait_for_all(self) -> None:
        for stream in self.streams:
            self.wait_for(stream.end, "torch.cuda.synchronize")

    def wait_for(self, mark: Mark, why: str) -> None:
        self.refuse_in_capture(why)
        self.waits.append(why)
        if self.fault is not None:
            raise RuntimeError(str(self.fault))
        try:
            with _disable_current_modes(), torch.inference_mode():
                mark.stream.reach(mark.number)
        except RuntimeError as error:
            self.fault = error
            raise

    def run_ahead(self) -> None:
        for stream in self.streams if self._is_hasty else ():
            if stream is not self.default:
                stream.run_ahead()

    def refuse_in_capture(self, why: str) -> None:
        if self.capture is not None:
            self.capture.is_broken = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {why}")


class StreamContext:
    """As `torch.cuda.stream`."""

    def __init__(self, timeline: Timeline, stream: Stream | None) -> None:
        self._timeline, self._stream = timeline, stream

    def __enter__(self) -> None:
        self._before = self._timeline.current
        self._timeline.current = self._stream or self._before

    def __exit__(self, *_: object) -> None:
        self._timeline.current = self._before
