"""The phases of the engine's steps on the host, for `gpu_host.py`: functions that are timed by name.

What a phase within another takes is its own alone, so that all of them, and what is left, are the step. Each call's
clock takes about a microsecond.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch, DecodeBatches
from headrace.engine.execution.cuda_graphs import CudaGraphs
from headrace.engine.models.decoder import Decoder
from headrace.engine.request import RequestEvent
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.steps import step_result
from headrace.engine.steps.sampling_batch import SamplingBatch
from headrace.engine.steps.step_events import StepEvents
from headrace.engine.steps.step_launcher import StepLauncher
from headrace.engine.transfer import Readback
from headrace.kernels.paged_attention import followed_plan

GRAPH, LAUNCH, WAITING = "launching the graph", "the rest of the launch", "waiting for the device"
# Whose, its name and its title, in the order in which a step mostly comes to them.
PHASES: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "scheduling"),
    (DecodeBatches, "batch", "building the batch from the one before"),
    (Batch, "build", "building the batch anew"),
    (CudaGraphs, "_load", "loading the plan"),
    (followed_plan, "upload", "uploading it"),
    (CudaGraphs, "_find_or_capture", "finding the graph, or capturing it"),
    # Nothing else is left of it.
    (CudaGraphs, "forward", GRAPH),
    (Decoder, "forward", "launching the model without a graph"),
    (Decoder, "logits_of_normed", "launching the logits' product"),
    (step_result, "likeliest_tokens", "launching the search for the largest"),
    (SamplingBatch, "sample", "sampling"),
    (Readback, "__init__", "beginning to read back"),
    (StepLauncher, "launch", LAUNCH),
    (Readback, "wait", WAITING),
    (step_result.LaunchedResult, "read", "reading the result"),
    (StepEvents, "of", "events"),
)


class Call(NamedTuple):
    """Of a phase. own: the seconds that no phase within it took."""

    title: str
    begin: float
    end: float
    own: float


@dataclass(frozen=True)
class Step:
    """A call of `Engine.step`, by `perf_counter`. is_decode: the step that it read had no tokens of prompts."""

    begin: float
    end: float
    calls: list[Call]
    is_decode: bool

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def own(self, *titles: str, until: float = inf) -> float:
        """Seconds in these phases, of those calls that had ended until then."""
        return sum(call.own for call in self.calls if call.title in titles and call.end <= until)


@contextmanager
def watched(engine: Engine) -> Iterator[list[Step]]:
    """The steps that the engine takes within it. Raises `KeyError` where a phase's function has another name."""
    steps, calls, inner = list[Step](), list[Call](), [0.0]

    def timed(function: Callable[..., Any], title: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            begin = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                end = perf_counter()
                calls.append(Call(title, begin, end, end - begin - inner.pop()))
                inner[-1] += end - begin

        return call

    def step() -> list[RequestEvent]:
        calls.clear()
        computed, generated = engine.stats.num_computed_tokens, engine.num_generated_tokens
        begin = perf_counter()
        events = Engine.step(engine)
        end = perf_counter()
        computed, generated = engine.stats.num_computed_tokens - computed, engine.num_generated_tokens - generated
        steps.append(Step(begin, end, calls.copy(), computed == generated))
        return events

    with ExitStack() as stack:
        for owner, name, title in PHASES:
            held = vars(owner)[name]
            of_class = isinstance(held, classmethod)
            call = timed(held.__func__ if of_class else held, title)
            stack.enter_context(patch.object(owner, name, classmethod(call) if of_class else call))
        stack.enter_context(patch.object(engine, "step", step))
        yield steps
