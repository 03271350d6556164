"""Where a decode step's time goes, for `gpu.py`: the host's share of it, and how long the device has nothing to do."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any

import torch
from gpu_device import Timing
from gpu_table import Line
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.request import Request, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams

# Between kernels that were launched long before: the device goes from one to the next, and waits for nobody.
_LAUNCH_MICROSECONDS = 5.0
_NUM_KERNELS = 25
# Whoever is to be looked at in so many steps is answered with so many tokens more: those that begin first have got some
# when the last begin, and nobody is to end before the last step.
SPARE_TOKENS = 16
_ids = count()


class ProfilerError(Exception):
    """torch's profiler does not show what the device does."""


@dataclass(frozen=True)
class StepTimes:
    """Of decode steps. `host`: all but waiting for the device."""

    step: Timing
    host: Timing


def step_times(llm: LLM, prompts: list[list[int]], steps: int) -> StepTimes:
    """What steps of as many decodes as there are prompts take, with the model: its graphs' loading and launch too."""
    fill(llm.engine, prompts, steps)
    whole, host = [], []
    for _ in range(steps):
        waited, start = llm.engine.stats.waited_seconds, time.perf_counter()
        llm.engine.step()
        whole.append(time.perf_counter() - start)
        host.append(whole[-1] - (llm.engine.stats.waited_seconds - waited))
    drain(llm.engine)
    return StepTimes(Timing.of(whole), Timing.of(host))


@dataclass(frozen=True)
class Interval:
    """What the device computed from `begin` to `end`, in microseconds of some clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """Decode steps as torch's profiler sees them; on a CPU of torch's own functions."""

    intervals: list[Interval]
    num_steps: int

    @classmethod
    def of(cls, llm: LLM, prompts: list[list[int]], steps: int) -> "StepProfile":
        """Raises `ProfilerError`."""
        fill(llm.engine, prompts, steps)
        return cls._of_steps(llm.engine, repeat(None, steps))

    @classmethod
    def of_prompts(cls, llm: LLM, prompts: list[list[int]], max_tokens: int) -> "StepProfile":
        """Steps that take in prompts, from the second on, beside those that decode then. Raises `ProfilerError`."""
        add(llm.engine, prompts, max_tokens)
        llm.engine.step()
        # One at least: a dry run's few are all taken in by now.
        more = iter(lambda: llm.engine.stats.num_waiting > 0, False)
        return cls._of_steps(llm.engine, chain((True,), more))

    @classmethod
    def _of_steps(cls, engine: Engine, steps: Iterable[object]) -> "StepProfile":
        is_gpu, num_steps = torch.cuda.is_available(), 0
        # After CUPTI's end, which some releases of torch bring about, CUDA graphs were seen to crash.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if is_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
        with profile(activities=[activity]) as profiled:
            for _ in steps:
                engine.step()
                num_steps += 1
        drain(engine)
        events: Iterable[Any] = profiled.events() or ()
        return cls.from_events(events, kind, num_steps)

    @classmethod
    def from_events(cls, events: Iterable[Any], kind: DeviceType, steps: int) -> "StepProfile":
        """Of torch's events those on a kind of device. Raises `ProfilerError`: there are none."""
        found = [Interval(each.name, *_range(each)) for each in events if each.device_type == kind]
        if not found:
            raise ProfilerError(
                "torch's profiler saw nothing of what the device did, so neither idle times nor kernels are known: it "
                "needs NVIDIA's CUPTI, which torch brings along, and a driver that lets it look"
            )
        return cls(found, steps)

    @property
    def waiting_share(self) -> float:
        """The share of time in which the device has nothing to compute, and waits for the host."""
        return idle_share(self._ranges, _LAUNCH_MICROSECONDS)

    @property
    def idle_share(self) -> float:
        """The same, with the moments between one kernel and the next."""
        return idle_share(self._ranges, 0.0)

    @property
    def _ranges(self) -> list[tuple[float, float]]:
        return [(each.begin, each.end) for each in self.intervals]

    def lines(self) -> list[Line]:
        """The kernels that take the most, with microseconds a step and their shares, how often each, and the rest."""
        taken: dict[str, list[float]] = defaultdict(list)
        for each in self.intervals:
            taken[each.name].append(each.end - each.begin)
        total = sum(map(sum, taken.values()))
        ranked = sorted(taken.items(), key=lambda item: -sum(item[1]))
        lines = [
            Line(
                f"  {len(times) / self.num_steps:6.1f} × {name[:50]}",
                sum(times) / self.num_steps,
                "us",
                sum(times) / total,
            )
            for name, times in ranked[:_NUM_KERNELS]
        ]
        rest = sum(sum(times) for _, times in ranked[_NUM_KERNELS:])
        count = len(self.intervals) / self.num_steps
        return [
            Line(f"kernels of a step, {count:.1f} launches: together", total / self.num_steps, "us"),
            *lines,
            Line("  all others", rest / self.num_steps, "us", rest / total),
            Line("waiting for the host", self.waiting_share, "share"),
            Line("waiting, or between kernels", self.idle_share, "share"),
        ]


def _range(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def idle_share(intervals: list[tuple[float, float]], least: float) -> float:
    """Of the time from the first interval's begin to the last one's end, what part is in gaps longer than `least`."""
    ordered = sorted(intervals)
    idle, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        if begin - reached > least:
            idle += begin - reached
        reached = max(reached, end)
    return idle / (reached - ordered[0][0])


def add(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """Answers are told when they end, as jobs and `LLM.generate` have it."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(Request(f"step-{next(_ids)}", prompt, params, output_kind=RequestOutputKind.FINAL_ONLY))


def fill(engine: Engine, prompts: list[list[int]], steps: int) -> None:
    """Begin to answer the prompts; in so many of the steps that follow, all decode."""
    add(engine, prompts, steps + SPARE_TOKENS)
    num_new = 0
    while num_new < len(prompts):
        assert engine.has_work, "answers end before all have begun: raise SPARE_TOKENS"
        num_before = engine.num_generated_tokens
        engine.step()
        num_new = engine.num_generated_tokens - num_before


def drain(engine: Engine) -> None:
    """Answer what there is to the end."""
    while engine.has_work:
        engine.step()
