"""Contenders measured in turns."""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from ceiling import gemm_seconds
from processes import OURS, CannotRun, Contender, EngineFailure, EngineProcess, Loaded, Reply
from shapes import SHAPES, checkpoint
from workloads import Recipe, Workload, first_token_only

WITH_CEILING = ("W1", "W3")
WITH_FIRST_TOKEN = ("W4",)
# So many times slower than the fastest, and one round says it.
SLOW = 5.0


@dataclass(frozen=True)
class Plan:
    """What is measured. An engine gets `timeout_seconds` to start and for every answer."""

    model: str
    contenders: list[Contender]
    recipes: dict[str, Recipe]
    rounds: int
    timeout_seconds: float

    def workload(self, name: str, number: int, rows: int | None = None) -> Workload:
        """No two names and no two numbers have a beginning in common: engines keep what they have computed."""
        return self.recipes[name].draw(f"{name} {number}", SHAPES[self.model].config["vocab_size"], rows)

    @property
    def max_model_len(self) -> int:
        """What the longest row needs, in steps of 256 tokens."""
        drawn = [self.workload(name, 0) for name in self.recipes]
        longest: int = max(len(prompt) + max(one.max_tokens) for one in drawn for prompt in one.prompts)
        return -(-longest // 256) * 256


@dataclass
class Measured:
    """One contender at one workload, by the number of the round."""

    seconds: dict[int, float] = field(default_factory=dict)
    first_token_seconds: dict[int, float] = field(default_factory=dict)


@dataclass
class Results:
    """Everything measured; `failures` and `cannot_run` hold the reasons.

    `first_tokens`: of each workload's rows in the warm-up, which are the same for all.
    """

    measured: dict[tuple[Contender, str], Measured]
    ceiling_seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    loaded: dict[Contender, Loaded] = field(default_factory=dict)
    peak_rss_bytes: dict[Contender, int] = field(default_factory=dict)
    failures: dict[Contender, str] = field(default_factory=dict)
    cannot_run: dict[tuple[Contender, str], str] = field(default_factory=dict)
    first_tokens: dict[tuple[Contender, str], list[int]] = field(default_factory=dict)

    def fail(self, contender: Contender, failure: EngineFailure) -> None:
        """A peer's end is a result; raises for our own."""
        if contender.engine == OURS:
            raise failure
        print(failure, file=sys.stderr, flush=True)
        self.failures[contender] = str(failure)

    def medians(self, name: str, contenders: Iterable[Contender]) -> dict[Contender, float]:
        """The median seconds of those that have any."""
        found = {contender: self.measured[contender, name].seconds for contender in contenders}
        return {contender: median(seconds.values()) for contender, seconds in found.items() if seconds}

    def is_slow(self, contender: Contender, name: str) -> bool:
        medians = self.medians(name, [other for other, at in self.measured if at == name])
        return contender in medians and medians[contender] > SLOW * min(medians.values())


def measure(plan: Plan) -> Results:
    results = Results({(contender, name): Measured() for contender in plan.contenders for name in plan.recipes})
    with ExitStack() as stack:
        processes = list(start_all(plan, results, stack))
        for process in processes:
            warm_up(process, plan, results)
        for number in range(1, plan.rounds + 1):
            measure_ceilings(plan, number, results)
            # Every other round backwards: what the machine does meanwhile hits each engine alike.
            order = processes if number % 2 else processes[::-1]
            for name in plan.recipes:
                for process in order:
                    if not results.is_slow(process.contender, name):
                        take_turn(process, plan, name, number, results)
            print(f"round {number} of {plan.rounds} done", file=sys.stderr, flush=True)
        results.peak_rss_bytes = {process.contender: process.peak_rss_bytes for process in processes}
    return results


def start_all(plan: Plan, results: Results, stack: ExitStack) -> Iterable[EngineProcess]:
    folder = checkpoint(plan.model)
    for contender in plan.contenders:
        try:
            process = EngineProcess(contender, folder, plan.max_model_len, plan.timeout_seconds)
        except EngineFailure as failure:
            results.fail(contender, failure)
            continue
        results.loaded[contender] = process.loaded
        yield stack.enter_context(process)


def warm_up(process: EngineProcess, plan: Plan, results: Results) -> None:
    """A quarter of each workload: libraries initialise and compile on first use."""
    for name, recipe in plan.recipes.items():
        reply = attempt(process, plan.workload(name, 0, recipe.cut(4).rows), name, results)
        if reply is not None:
            results.first_tokens[process.contender, name] = [tokens[0] for tokens in reply.tokens]


def measure_ceilings(plan: Plan, number: int, results: Results) -> None:
    """The least over the rounds: a machine that was busy meanwhile would make a low ceiling."""
    for name in filter(plan.recipes.__contains__, WITH_CEILING):
        for precision in dict.fromkeys(contender.precision for contender in plan.contenders):
            seconds = gemm_seconds(plan.model, precision, plan.workload(name, number))
            least = results.ceiling_seconds.get((name, precision), seconds)
            results.ceiling_seconds[name, precision] = min(least, seconds)


def take_turn(process: EngineProcess, plan: Plan, name: str, number: int, results: Results) -> None:
    into = results.measured[process.contender, name]
    if name in WITH_FIRST_TOKEN:
        reply = attempt(process, first_token_only(plan.workload(name, -number)), name, results)
        if reply is not None:
            into.first_token_seconds[number] = reply.seconds
    reply = attempt(process, plan.workload(name, number), name, results)
    if reply is not None:
        into.seconds[number] = reply.seconds


def attempt(process: EngineProcess, workload: Workload, name: str, results: Results) -> Reply | None:
    """The reply, unless the contender fails, cannot run this or did so before; the reason is kept."""
    contender = process.contender
    if contender in results.failures or (contender, name) in results.cannot_run:
        return None
    try:
        reply = process.run(workload)
        print(f"{name}, {workload.rows} rows: {contender} {reply.seconds:.2f} s", file=sys.stderr, flush=True)
        return reply
    except CannotRun as reason:
        results.cannot_run[contender, name] = str(reason)
    except EngineFailure as failure:
        results.fail(contender, failure)
    return None
