"""Which prompts of a call have all their answers."""

from collections.abc import Iterator, Mapping, Sequence

from ..request import Request, RequestEvent


class Answered:
    """What steps bring, put together by prompt. prompts: the requests that answer each, one or more."""

    def __init__(self, prompts: Sequence[Sequence[Request]]) -> None:
        self._prompts = prompts
        self._place_of = {request.request_id: place for place, samples in enumerate(prompts) for request in samples}
        self._num_missing = [len(samples) for samples in prompts]
        self._events: dict[str, list[RequestEvent]] = {}

    def by(self, step: Sequence[RequestEvent]) -> Iterator[tuple[int, Mapping[str, Sequence[RequestEvent]]]]:
        """Those that have all by this step, the one after the last: each one's place, and its requests' events."""
        for event in step:
            self._events.setdefault(event.request_id, []).append(event)
            place = self._place_of[event.request_id]
            self._num_missing[place] -= event.finished
            if event.finished and not self._num_missing[place]:
                yield place, {each.request_id: self._events.pop(each.request_id) for each in self._prompts[place]}
