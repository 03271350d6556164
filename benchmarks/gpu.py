"""The GPU's figures against its limits: correctness, then kernels, then end to end, in under eight minutes.

    python benchmarks/gpu.py             # needs torch, triton, numpy, tokenizers and safetensors, and no installation
    python benchmarks/gpu.py --only sharing,linears,kernels,mixtures,lora,states    # parts, into the same file
    python benchmarks/gpu.py --profile   # the kernels of a decode step, by the time they take
    python benchmarks/gpu.py --only host # where the host's time goes, in a decode step and in whole workloads
    python benchmarks/gpu.py --dry-run   # the same, tiny, on a CPU in Triton's interpreter: its figures mean nothing

The first has a figure of each of the goals that the project set itself before there was a figure, by number, in the
order of their weight, and what else there is time for: a part that does not fit into what is left is left out by name.

It is for any one GPU of Hopper's, of 80 GB or more: limits are measured on it in the same run, and the results' file is
named after it. Weights are random: speed does not read them. Each part runs in a process of its own, so that one that
crashes or hangs costs its own figures and no other's; the next one's is started beside it, and waits until it is over.
What is measured is printed and in the file after every line; `gpu_report.py` makes the README's table of such files.
transformers, vLLM and FlashInfer are compared with where they are installed. The last line is JSON; the exit status is
1 where kernels disagree with their references or the engine's greedy tokens with the CPU's: no figure counts then.
"""

import argparse
import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu_children import Children
from gpu_device import about_device, prepare, results_name
from gpu_parts import CORRECT, EXTRAS, PROFILES, Part, import_all, parts_of
from gpu_report import markdown
from gpu_table import Table
from report import ROOT, environment

# How many times as long as it should a part may take where there is time for all that is wanted after it, and where
# there is not.
_PATIENCE, _LEAST_PATIENCE = 3, 1.5


def main() -> None:
    arguments = _arguments()
    prepare(arguments.dry_run)
    if arguments.is_child:
        # Where it is when it has taken too long, and where it crashes.
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        import_all()
        # Of another process's end, a line says.
        if not sys.stdin.readline():
            sys.exit(1)
    arguments.output = _results_file(arguments)
    about = environment() | ({"commit": arguments.commit} if arguments.commit else {})
    table = Table(arguments.output, about)
    chosen = [part for part in parts_of(arguments.dry_run) if _is_wanted(part, arguments)]
    if arguments.is_child:
        for part in chosen:
            part.run(table)
        return
    print(", ".join(f"{name} {value}" for name, value in table.about.items()), flush=True)
    # What stops it gets what there is too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if arguments.dry_run or arguments.here:
            for part in chosen:
                part.run(table)
        else:
            run_apart(chosen, table, arguments.seconds, partial(_command, arguments))
    finally:
        print("", *markdown(table.content), json.dumps(table.content), sep="\n", flush=True)
    names = {part.name for part in chosen}
    sys.exit(1 if names & (table.wrong | ({CORRECT} & table.failures.keys())) else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--only", help="parts, by name: " + ", ".join(part.name for part in parts_of(is_dry=True)))
    parser.add_argument("--profile", action="store_true", help=f"the parts {', '.join(PROFILES)}")
    help_of_seconds = "how long parts may take, after ten seconds of its own; what is left out is said"
    parser.add_argument("--seconds", type=float, default=470, help=help_of_seconds)
    parser.add_argument("--output", type=Path, help="the JSON's file, or a folder for it; what it has is gone on with")
    parser.add_argument("--commit", help="what was measured, where git cannot tell")
    parser.add_argument("--here", action="store_true", help="all parts in this process, as in a dry run")
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = {part.name for part in parts_of(is_dry=True)}
    if unknown := set((arguments.only or "").split(",")) - names - {""}:
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    return arguments


def _results_file(arguments: argparse.Namespace) -> Path | None:
    """None where none is asked for and a file is not needed: processes tell each other by it."""
    file: Path | None = arguments.output
    if file is None:
        if arguments.dry_run or arguments.here:
            return None
        file = ROOT / "out" / "bench"
        file.mkdir(parents=True, exist_ok=True)
    return file / results_name(about_device()["gpu"]) if file.is_dir() else file


def _is_wanted(part: Part, arguments: argparse.Namespace) -> bool:
    if arguments.only:
        return part.name in arguments.only.split(",")
    if arguments.profile:
        return part.name in PROFILES
    return part.name not in EXTRAS


def _command(arguments: argparse.Namespace, part: Part) -> list[str]:
    """Measures a part and writes it to the same file, once it is sent a line."""
    command = [sys.executable, __file__, "--is-child", "--only", part.name, "--output", str(arguments.output)]
    return [*command, "--commit", arguments.commit] if arguments.commit else command


def run_apart(parts: list[Part], table: Table, seconds: float, command_of: Callable[[Part], list[str]]) -> None:
    """Each in a process, which is ended when it has taken much longer than it should or there is no time.

    Those that have a goal's figures take no time from one another's but what they need themselves.
    """
    end = time.monotonic() + seconds
    there = [part for part in parts if part.is_there]
    for part in parts:
        if not part.is_there:
            table.leave_out(part.name, f"{part.package} is not installed here")
    with Children(command_of) as children:
        for place, part in enumerate(there):
            left, following = end - time.monotonic(), there[place + 1 :]
            if left < part.seconds:
                table.leave_out(part.name, f"not run: {left:.0f} s were left, and it takes about {part.seconds:.0f}")
                continue
            print(f"\n{part.name}:", flush=True)
            wanted = sum(each.seconds for each in following if each.goals)
            most = min(_PATIENCE * part.seconds, max(left - wanted, _LEAST_PATIENCE * part.seconds), left)
            failure = children.run(part, most, following[0] if following else None)
            table.reread()
            if failure is not None:
                table.fail(part.name, failure)


if __name__ == "__main__":
    main()
