"""How long live answers take, as histograms with vLLM's names and buckets."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..streams.events import StreamEvent

_LABELS = ("model_name",)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_FIRST_TOKEN_LONG = (*_FIRST_TOKEN, 80.0, 160.0, 640.0, 2560.0)
# The two lowest are ours.
_BETWEEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_BETWEEN_LONG = (*_BETWEEN, 20.0, 40.0, 80.0)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_REQUEST_LONG = (*_REQUEST, 960.0, 1920.0, 7680.0)


class Latencies(Collector):
    """Of all live requests that this process hands on, streamed or not, over HTTP and gRPC. For its event loop."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From a request's arrival to the first token of each of its answers.",
            _LABELS,
            buckets=_FIRST_TOKEN_LONG,
            registry=None,
        )
        self.between_tokens = Histogram(
            "headrace_inter_token_latency_seconds",
            "Between a token and the next; those that come together share their time.",
            _LABELS,
            buckets=_BETWEEN_LONG,
            registry=None,
        )
        self.request = Histogram(
            "headrace_e2e_request_latency_seconds",
            "From a request's arrival to the end of its last answer, where all are complete.",
            _LABELS,
            buckets=_REQUEST_LONG,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        for histogram in (self.first_token, self.between_tokens, self.request):
            yield from histogram.collect()

    def timer(self, model: str, arrived_at: float) -> "Timer":
        return Timer(
            arrived_at,
            self.first_token.labels(model),
            self.between_tokens.labels(model),
            self.request.labels(model),
        )


@dataclass
class Timer:
    """One request's. `arrived_at`: as `time.perf_counter` has it."""

    arrived_at: float
    first_token: Histogram
    between_tokens: Histogram
    request: Histogram
    # When each answer's last token came.
    _last: dict[int, float] = field(default_factory=dict)

    def note(self, choice: int, event: StreamEvent) -> None:
        """What has come of an answer just now."""
        if not event.token_ids:
            return
        now = time.perf_counter()
        last = self._last.get(choice)
        self._last[choice] = now
        if last is None:
            self.first_token.observe(now - self.arrived_at)
            return
        between = (now - last) / len(event.token_ids)
        for _ in event.token_ids:
            self.between_tokens.observe(between)

    def end(self) -> None:
        """All answers are complete."""
        self.request.observe(time.perf_counter() - self.arrived_at)
