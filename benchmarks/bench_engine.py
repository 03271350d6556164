"""Our engine against its peers: the same random weights, the same token ids, greedy, each engine in its own process.

    python benchmarks/bench_engine.py [--peers vllm,openvino,llamacpp,ctranslate2,transformers] [--model M1]
                                      [--workloads W1,W2 | --sweep batch,prefix] [--precisions bfloat16,int8]
                                      [--rounds 3] [--quick] [--output FILE]

Peers are installed by `benchmarks/peers/install.sh`; without `--peers`, those that are take part.

Before any speed is printed, our tokens for a small model in float32 must be those of transformers, and each peer's are
compared as well. Engines take turns, workload by workload, and each round has prompts of its own, so that nothing is
found in a cache that an earlier round filled. A contender that is five times slower than the fastest at a workload has
one round there. The time of the matrix products alone, measured in the same run, is the ceiling. The last line is JSON.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from figures import Table, figures_of
from gate import check_tokens
from processes import OURS, PEERS, PRECISIONS, Contender, EngineFailure, is_installed, precisions_of
from report import print_result
from rounds import Plan, measure
from shapes import SHAPES
from workloads import RECIPES, SWEEPS, Recipe

QUICK = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workloads", type=some_of(RECIPES), default=list(RECIPES))
    what.add_argument("--sweep", type=some_of(SWEEPS), default=[], help="instead of the workloads: batch,prefix")
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "gate"], default="M1")
    parser.add_argument("--precisions", type=some_of(PRECISIONS), default=["bfloat16", "int8"])
    parser.add_argument("--peers", type=some_of(PEERS), help="without it, those that are installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for each answer of an engine")
    parser.add_argument("--quick", action="store_true", help=f"a {QUICK}th of the rows: does everything run?")
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    return parser.parse_args()


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between them."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}: known are {', '.join(known)}")
        return found

    return names


def plan_of(options: argparse.Namespace) -> Plan:
    peers = filter(is_installed, PEERS) if options.peers is None else options.peers
    contenders = [
        Contender(engine, precision)
        for engine in (OURS, *peers)
        for precision in options.precisions
        if precision in precisions_of(engine)
    ]
    recipes = swept(options.sweep) or {name: RECIPES[name] for name in options.workloads}
    if options.quick:
        recipes = {name: recipe.cut(QUICK) for name, recipe in recipes.items()}
    return Plan(options.model, contenders, recipes, max(1, options.rounds), options.timeout)


def swept(sweeps: list[str]) -> dict[str, Recipe]:
    return {f"{sweep}={value}": recipe for sweep in sweeps for value, recipe in SWEEPS[sweep].items()}


def main() -> None:
    options = parse()
    plan = plan_of(options)
    try:
        verdicts = check_tokens(plan.contenders, plan.timeout_seconds)
        shape = SHAPES[plan.model].name
        print(f"{plan.model} ({shape} shape, random weights), medians of {plan.rounds} rounds", flush=True)
        figures = figures_of(plan, measure(plan), verdicts)
    except EngineFailure as failure:
        sys.exit(str(failure))
    print("\n".join(Table(figures).lines()))
    print_result("engine", figures, options.output)


if __name__ == "__main__":
    main()
