"""What streams are given to do while they are captured."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .streams import Event, Mark, Stream, Timeline


class Capture:
    """`streams`: those that are captured, the first by itself and others from when they wait for one of these.

    `recorded`: the events, each with its stream and how much of that it comes after.
    """

    def __init__(self, origin: "Stream") -> None:
        self.origin = origin
        self.streams: dict[Stream, int] = {origin: 0}
        self.recorded: dict[Event, tuple[Stream, int]] = {}
        self.is_broken = False
        self._steps: list[Callable[[dict[Stream, Stream], dict[Event, Mark]], None]] = []
        # How much of each stream's work another one has waited for.
        self._joined: dict[Stream, int] = {}

    def launch(self, stream: "Stream", work: Callable[[], object]) -> None:
        self.streams[stream] += 1
        self._steps.append(lambda streams, marks: streams[stream].launch(work))

    def record(self, stream: "Stream", event: "Event") -> None:
        self.recorded[event] = stream, self.streams[stream]
        self._steps.append(lambda streams, marks: marks.update({event: streams[stream].end}))

    def wait(self, stream: "Stream", event: "Event") -> None:
        if event not in self.recorded:
            self.is_broken = True
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")
        self.streams.setdefault(stream, 0)
        source, number = self.recorded[event]
        self._joined[source] = number
        self._steps.append(lambda streams, marks: streams[stream].launch(marks[event]))

    @property
    def is_joined(self) -> bool:
        """Whether nothing is left that the first stream would not wait for."""
        others = ((stream, number) for stream, number in self.streams.items() if stream is not self.origin)
        return all(self._joined.get(stream, 0) == number for stream, number in others)

    def replay(self, timeline: "Timeline", new_stream: "Callable[[], Stream]") -> None:
        """Launch it all again, on the current stream and others beside it."""
        streams = {stream: timeline.current if stream is self.origin else new_stream() for stream in self.streams}
        marks: dict[Event, Mark] = {}
        for step in self._steps:
            step(streams, marks)
