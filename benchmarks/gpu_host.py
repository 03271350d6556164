"""Where the host's time goes, for `gpu.py`: phase by phase in a decode step, and from begin to end of a workload."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from time import perf_counter

import torch
from gpu_device import Timing
from gpu_engine import Workload, generate, load_for
from gpu_phases import GRAPH, LAUNCH, PHASES, WAITING, Step, watched
from gpu_steps import SPARE_TOKENS, drain, fill
from gpu_table import Line
from gpu_workloads import EngineSizes

from headrace.engine.collector import leave_alone_what_is_there
from headrace.engine.llm import LLM

# So many of the longest are said of a workload's steps.
_NUM_PHASES = 4


def host_lines(sizes: EngineSizes, device: torch.device) -> Iterator[Line]:
    """Of the small model: of a line within a step or a workload the ratio is its share of that."""
    model = sizes.small
    named = {"shared prompt": sizes.shared, "labels": sizes.labels}
    workloads = {f"{model}, {name}": Workload.shared(model, *size) for name, size in named.items()}
    requests, shared, own, _ = sizes.shared
    decodes = Workload.shared(model, requests, shared, own, sizes.steps + SPARE_TOKENS, seed=3)
    # One step ahead, in a dry run as well.
    llm = load_for(model, device, [*workloads.values(), decodes], async_scheduling=True)
    yield from _step_lines(f"{model}, a step of {requests} decodes", llm, decodes.prompts, sizes.steps)
    for name, work in workloads.items():
        yield from _workload_lines(name, llm, work, sizes.rounds)


def _step_lines(name: str, llm: LLM, prompts: list[list[int]], num_steps: int) -> Iterator[Line]:
    """As `generate` has them, without the collector, and each with a device that has nothing to do when it begins.

    Mostly the device still computes a step while the host launches the next one.
    """
    # Compiles kernels and captures graphs.
    decode_steps(llm, prompts, num_steps)
    usual = decode_steps(llm, prompts, num_steps)
    yield from _phase_lines(name, usual)
    with _no_collector():
        yield from _phase_lines(f"{name}, no collector", decode_steps(llm, prompts, num_steps))
    is_gpu = llm.engine.device.type == "cuda"
    idle = decode_steps(llm, prompts, num_steps, torch.cuda.synchronize if is_gpu else lambda: None)
    yield from _phase_lines(f"{name}, idle device", idle)
    on_busy, on_idle = (median(step.own(GRAPH) for step in each) for each in (usual, idle))
    # Without graphs there is nothing to compare.
    ratio = on_idle / on_busy if on_busy else None
    yield Line(f"{GRAPH} on an idle device: of that on a busy one", on_idle * 1e6, "us", ratio)


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode_steps(
    llm: LLM, prompts: list[list[int]], num_steps: int, before: Callable[[], object] = lambda: None
) -> list[Step]:
    """Steps in which all prompts' answers get a token. before: what is done before each."""
    steps: list[Step]
    fill(llm.engine, prompts, num_steps)
    with leave_alone_what_is_there(), watched(llm.engine) as steps:
        for _ in range(num_steps):
            before()
            llm.engine.step()
    drain(llm.engine)
    return steps


def _phase_lines(name: str, steps: list[Step]) -> Iterator[Line]:
    """What the middle step takes, and how often a step comes to each phase."""
    titles = [title for _, _, title in PHASES]
    whole, host = [step.seconds for step in steps], [step.seconds - step.own(WAITING) for step in steps]
    middle = median(whole)

    def line(title: str, seconds: float, spread: float | None = None) -> Line:
        return Line(title, seconds * 1e6, "us", seconds / middle, spread=spread)

    yield line(name, middle, Timing.of(whole).spread)
    yield line("  host", median(host), Timing.of(host).spread)
    yield line("  host, on the average", mean(host))
    for title in titles:
        number = sum(call.title == title for step in steps for call in step.calls) / len(steps)
        yield line(f"  {number:4.1f} × {title}", median(step.own(title) for step in steps))
    yield line("  all else", median(step.seconds - step.own(*titles) for step in steps))


def _workload_lines(name: str, llm: LLM, work: Workload, rounds: int) -> Iterator[Line]:
    """Of the round that was neither fast nor slow."""
    generate(llm, work)
    measured = [periods(llm, work.with_other_tokens(number + 1)) for number in range(rounds)]
    wholes = [sum(each.values()) for each, _ in measured]
    whole = sorted(wholes)[rounds // 2]
    yield Line(name, whole * 1e3, "ms", spread=(max(wholes) - min(wholes)) / whole)
    found, longest = measured[wholes.index(whole)]
    for title, seconds in [*found.items(), *longest.items()]:
        yield Line(f"  {title}", seconds * 1e3, "ms", seconds / whole)


def periods(llm: LLM, work: Workload) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a call of `generate`, and what the host waits for the device of them, by what steps are read then; and
    of each kind of step the phases that took longest, waiting left aside.
    """
    begin = perf_counter()
    with watched(llm.engine) as steps:
        generate(llm, work)
    end = perf_counter()
    launches = [call for step in steps for call in step.calls if call.title == LAUNCH]
    first, last = launches[0].begin, launches[-1].end
    found, longest = {"until the first launch": first - begin}, dict[str, float]()
    for kind, is_decode in (("steps with prompts", False), ("decode steps", True)):
        chosen = [step for step in steps if step.is_decode is is_decode]
        seconds = sum(max(0.0, min(step.end, last) - max(step.begin, first)) for step in chosen)
        waited = sum(step.own(WAITING, until=last) for step in chosen)
        found |= {f"{len(chosen)} {kind}: host": seconds - waited, f"{len(chosen)} {kind}: waiting": waited}
        own = {title: sum(step.own(title) for step in chosen) for _, _, title in PHASES if title != WAITING}
        for title in sorted(own, key=own.__getitem__, reverse=True)[:_NUM_PHASES]:
            longest[f"{kind}, of the host: {title}"] = own[title]
    waited = sum(step.own(WAITING) - step.own(WAITING, until=last) for step in steps)
    after = {"after the last launch: host": end - last - waited, "after the last launch: waiting": waited}
    return found | after, longest
