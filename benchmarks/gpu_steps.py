"""Where a decode step's time goes, for `gpu.py`: the host's share of it, and how long the device has nothing to do."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.request import Request, SamplingParams

# Between kernels that were launched long before: the device goes from one to the next, and waits for nobody.
_LAUNCH_MICROSECONDS = 5.0
_ids = count()


@dataclass(frozen=True)
class StepTimes:
    """Medians of decode steps, in microseconds. `host`: all but waiting for the device."""

    step: float
    host: float


def step_times(llm: LLM, prompts: list[list[int]], steps: int) -> StepTimes:
    """What steps of as many decodes as there are prompts take, with the model: its graphs' loading and launch too."""
    _fill(llm.engine, prompts, steps + 4)
    whole, host = [], []
    for _ in range(steps):
        waited, start = llm.engine.stats.waited_seconds, time.perf_counter()
        llm.engine.step()
        whole.append(time.perf_counter() - start)
        host.append(whole[-1] - (llm.engine.stats.waited_seconds - waited))
    _drain(llm.engine)
    return StepTimes(median(whole) * 1e6, median(host) * 1e6)


@dataclass(frozen=True)
class Idle:
    """Shares of a time in which the device computes nothing: `waiting` for the host, and `between` kernels as well."""

    waiting: float
    between: float


def idle_shares(llm: LLM, prompts: list[list[int]], steps: int) -> Idle:
    """Of decode steps, as torch's profiler sees them; on a CPU of the time between torch's own functions."""
    is_gpu = torch.cuda.is_available()
    _fill(llm.engine, prompts, steps + 4)
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if is_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as profiled:
        for _ in range(steps):
            llm.engine.step()
    _drain(llm.engine)
    events: Iterable[Any] = profiled.events() or ()
    intervals = [(each.time_range.start, each.time_range.end) for each in events if each.device_type == kind]
    return Idle(idle_share(intervals, _LAUNCH_MICROSECONDS), idle_share(intervals, 0.0))


def idle_share(intervals: list[tuple[float, float]], least: float) -> float:
    """Of the time from the first interval's begin to the last one's end, what part is in gaps longer than `least`."""
    ordered = sorted(intervals)
    idle, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        if begin - reached > least:
            idle += begin - reached
        reached = max(reached, end)
    return idle / (reached - ordered[0][0])


def _fill(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """Begin to answer the prompts; what follows are decode steps."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    waiting = {f"step-{next(_ids)}": prompt for prompt in prompts}
    for request_id, prompt in waiting.items():
        engine.add(Request(request_id, prompt, params))
    begun: set[str] = set()
    while len(begun) < len(waiting):
        begun |= {event.request_id for event in engine.step()}


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
