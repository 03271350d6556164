"""Runs requests through an engine to their end."""

from collections.abc import Sequence

from headrace.engine.engine import Engine
from headrace.engine.request import Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[RequestEvent]]:
    """Add all, step until idle with a check after each step; each request's events."""
    for request in requests:
        engine.add(request)
    events: dict[str, list[RequestEvent]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    return events


def token_ids(events: Sequence[RequestEvent]) -> list[int]:
    return [token for event in events for token in event.new_token_ids]


def greedy_params(max_tokens: int | None = 64) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
