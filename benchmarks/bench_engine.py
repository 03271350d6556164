"""Our engine against its peers: the same random weights, the same token ids, greedy, each engine in its own process.

    python benchmarks/bench_engine.py [--workloads W1,W2] [--model M1] [--dtype bfloat16] [--peers transformers,vllm]
                                      [--rounds 3] [--quick | --full]

Before any speed is printed, every peer must generate our tokens for a small model in float32. Engines take turns, round
by round, and each round has prompts of its own, so that nothing is found in a cache that an earlier round filled. The
time of the matrix products alone, measured in the same run, is the ceiling. The last line is JSON.
"""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from ceiling import gemm_seconds
from processes import PEERS, EngineFailure, EngineProcess, Reply, is_installed
from report import print_result, spread
from shapes import SHAPES, checkpoint
from workloads import RECIPES, Workload, first_token_only, gate_workload

OURS = "headrace"
MAX_MODEL_LEN = 2560
WITH_CEILING = ("W1", "W3")


@dataclass(frozen=True)
class Plan:
    """What is measured; `rows` has each workload's number of rows."""

    model: str
    dtype: str
    engines: list[str]
    rows: dict[str, int]
    rounds: int

    def workload(self, name: str, seed: int, rows: int | None = None) -> Workload:
        vocab_size = SHAPES[self.model].config["vocab_size"]
        return RECIPES[name].draw(seed, vocab_size, rows or self.rows[name])


@dataclass
class Measured:
    """One engine at one workload, a number a round."""

    seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)


@dataclass
class Results:
    """Everything measured: by engine and workload, by engine, and by workload."""

    measured: dict[tuple[str, str], Measured]
    loaded: dict[str, Reply]
    peak_rss_bytes: dict[str, int]
    ceiling_seconds: dict[str, float]


def check_tokens(engines: list[str]) -> None:
    """The gate: every engine's greedy tokens of a small float32 model are ours, or the run ends here."""
    folder = checkpoint("gate")
    workload = gate_workload(SHAPES["gate"].config["vocab_size"])
    expected: list[list[int]] = []
    for engine in engines:
        with EngineProcess(engine, folder, "float32", SHAPES["gate"].config["max_position_embeddings"]) as process:
            tokens = process.run(workload).tokens
        if engine == OURS:
            expected = tokens
        differing = [row for row, (own, other) in enumerate(zip(expected, tokens, strict=True)) if own != other]
        if differing:
            sys.exit(f"{engine} and {OURS} differ in rows {differing} of the gate: no speed is worth printing")
    count = sum(map(len, expected))
    print(f"gate: {count} greedy tokens of a float32 model are the same in {', '.join(engines)}", flush=True)


def measure(plan: Plan) -> Results:
    folder = checkpoint(plan.model)
    measured = {(engine, name): Measured() for engine in plan.engines for name in plan.rows}
    ceilings: dict[str, list[float]] = {name: [] for name in plan.rows if name in WITH_CEILING}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(EngineProcess(engine, folder, plan.dtype, MAX_MODEL_LEN)) for engine in plan.engines
        ]
        for process in processes:
            warm_up(process, plan)
        peak = {process.engine: process.loaded.peak_rss_bytes for process in processes}
        for number in range(1, plan.rounds + 1):
            for name, seconds in ceilings.items():
                seconds.append(gemm_seconds(plan.model, getattr(torch, plan.dtype), plan.workload(name, number)))
            # Every other round backwards: what the machine does meanwhile hits each engine alike.
            for process in processes if number % 2 else reversed(processes):
                for name in plan.rows:
                    reply = run_once(process, plan, name, number, measured[process.engine, name])
                    peak[process.engine] = reply.peak_rss_bytes
            print(f"round {number} of {plan.rounds} done", file=sys.stderr, flush=True)
        loaded = {process.engine: process.loaded for process in processes}
    # The least: a machine that was busy meanwhile would make a low ceiling.
    return Results(measured, loaded, peak, {name: min(seconds) for name, seconds in ceilings.items()})


def warm_up(process: EngineProcess, plan: Plan) -> None:
    """A quarter of each workload: libraries initialise and compile on first use."""
    for name, rows in plan.rows.items():
        process.run(plan.workload(name, 0, max(1, rows // 4)))


def run_once(process: EngineProcess, plan: Plan, name: str, number: int, into: Measured) -> Reply:
    if name == "W4":
        first = first_token_only(plan.workload(name, -number))
        into.first_token_seconds.append(process.run(first).seconds)
    reply = process.run(plan.workload(name, number))
    into.seconds.append(reply.seconds)
    into.tokens.append(reply.tokens)
    return reply


def figures_of(plan: Plan, results: Results) -> dict[str, Any]:
    engines = {}
    for engine in plan.engines:
        workloads = {name: workload_figures(plan, results, engine, name) for name in plan.rows}
        engines[engine] = {
            "version": results.loaded[engine].version,
            "load_seconds": results.loaded[engine].seconds,
            "peak_rss_bytes": results.peak_rss_bytes[engine],
            "workloads": workloads,
        }
    return {
        "model": plan.model,
        "dtype": plan.dtype,
        "rounds": plan.rounds,
        "rows": plan.rows,
        "ceiling_seconds": results.ceiling_seconds,
        "engines": engines,
    }


def workload_figures(plan: Plan, results: Results, engine: str, name: str) -> dict[str, Any]:
    measured, ours = results.measured[engine, name], results.measured[OURS, name]
    figures: dict[str, Any] = {"seconds": spread(measured.seconds)}
    figures["rows_per_second"] = plan.rows[name] / figures["seconds"]["median"]
    figures["ratio"] = spread([own / other for own, other in zip(ours.seconds, measured.seconds, strict=True)])
    if name in results.ceiling_seconds:
        figures["share_of_ceiling"] = results.ceiling_seconds[name] / figures["seconds"]["median"]
    if measured.first_token_seconds:
        both = zip(measured.seconds, measured.first_token_seconds, strict=True)
        further_tokens = plan.workload(name, 1).output_tokens - 1
        figures["first_token_ms"] = spread([1000 * seconds for seconds in measured.first_token_seconds])
        figures["token_ms"] = spread([1000 * (whole - first) / further_tokens for whole, first in both])
    if plan.dtype == "float32":
        pairs = [
            own == other
            for both in zip(ours.tokens, measured.tokens, strict=True)
            for own, other in zip(*both, strict=True)
        ]
        figures["rows_with_our_tokens"] = sum(pairs) / len(pairs)
    return figures


def print_table(figures: dict[str, Any]) -> None:
    for name, rows in figures["rows"].items():
        recipe = RECIPES[name]
        cut = "" if rows == recipe.rows else f" of {recipe.rows}"
        print(f"\n{name}: {rows}{cut} rows, {recipe.text}")
        for engine, of_engine in figures["engines"].items():
            print(f"  {engine:<14}{row_text(of_engine['workloads'][name])}")
        if name in figures["ceiling_seconds"]:
            print(f"  {'products alone':<14}{figures['ceiling_seconds'][name]:8.2f} s")
    print()
    for engine, of_engine in figures["engines"].items():
        gib = of_engine["peak_rss_bytes"] / 1024**3
        print(f"{engine} {of_engine['version']}: loaded in {of_engine['load_seconds']:.1f} s, at most {gib:.1f} GiB")


def row_text(figures: dict[str, Any]) -> str:
    seconds, ratio = figures["seconds"], figures["ratio"]
    text = f"{seconds['median']:8.2f} s ({seconds['min']:.2f} to {seconds['max']:.2f})"
    text += f"{figures['rows_per_second']:9.1f} rows/s   {ratio['median']:5.2f} × our speed"
    if "token_ms" in figures:
        text += f"   {figures['first_token_ms']['median']:.1f} ms to the first token, "
        text += f"{figures['token_ms']['median']:.1f} ms a token"
    if "share_of_ceiling" in figures:
        text += f"   {figures['share_of_ceiling']:.0%} of the ceiling"
    if "rows_with_our_tokens" in figures:
        text += f"   {figures['rows_with_our_tokens']:.0%} rows equal"
    return text


def parse_plan() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(RECIPES))
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "gate"], default="M1")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--peers", help=f"of {','.join(PEERS)}; without it, those that are installed")
    parser.add_argument("--rounds", type=int, default=3)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a quarter of every workload's rows")
    size.add_argument("--full", action="store_true", help="all rows of the slow ones (W3, W5, W6) too")
    options = parser.parse_args()
    names = chosen(parser, options.workloads, tuple(RECIPES))
    peers = list(filter(is_installed, PEERS)) if options.peers is None else chosen(parser, options.peers, PEERS)
    rows = {}
    for name in names:
        recipe = RECIPES[name]
        cut = options.quick or (recipe.is_slow and not options.full)
        rows[name] = recipe.quarter() if cut else recipe.rows
    return Plan(options.model, options.dtype, [OURS, *peers], rows, max(1, options.rounds))


def chosen(parser: argparse.ArgumentParser, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            parser.error(f"unknown {name!r}: known are {', '.join(known)}")
    return names


def main() -> None:
    plan = parse_plan()
    shape = SHAPES[plan.model].name
    try:
        check_tokens(plan.engines)
        print(
            f"{plan.model} ({shape} shape, random weights), {plan.dtype}, medians of {plan.rounds} rounds", flush=True
        )
        figures = figures_of(plan, measure(plan))
    except EngineFailure as failure:
        sys.exit(str(failure))
    print_table(figures)
    print_result("engine", figures)


if __name__ == "__main__":
    main()
