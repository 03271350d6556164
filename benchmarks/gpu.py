"""The GPU's figures against its limits: correctness, then kernels, then end to end, in under eight minutes on an H200.

    python benchmarks/gpu.py             # needs torch, triton, numpy, tokenizers and safetensors, and no installation
    python benchmarks/gpu.py --only linears,kernels --output h200-gpu.json    # parts of it, into the same file
    python benchmarks/gpu.py --profile   # the kernels of a decode step, by the time they take
    python benchmarks/gpu.py --dry-run   # the same, tiny, on a CPU in Triton's interpreter: its figures mean nothing

Weights are random: speed does not read them. Each part runs in a process of its own, so that one that crashes or hangs
costs its own figures and no other's, and what is measured is in the file after every line; `gpu_report.py` makes the
README's table of such files. The goals are those the project set itself before there was a figure, by number.
transformers, vLLM and FlashInfer are compared with where they are installed. The last line is JSON; the exit status is
1 where the kernels disagree with their references or the engine's greedy tokens with the CPU's: no figure counts then.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpu_device import about_device, prepare, results_name
from gpu_parts import CORRECT, EXTRAS, PROFILES, Part, parts_of
from gpu_table import Table
from report import ROOT, environment

# How many times as long as it should a part may take before it is taken to hang.
_PATIENCE = 3


def main() -> None:
    arguments = _arguments()
    prepare(arguments.dry_run)
    about = environment() | ({"commit": arguments.commit} if arguments.commit else {})
    table = Table(arguments.output, about)
    if not arguments.is_child:
        print(", ".join(f"{name} {value}" for name, value in table.about.items()), flush=True)
    chosen = [part for part in parts_of(arguments.dry_run) if _is_wanted(part, arguments)]
    if arguments.here:
        for part in chosen:
            part.run(table)
    else:
        run_apart(chosen, table, arguments.seconds, partial(_command, arguments))
    if not arguments.is_child:
        print(json.dumps(table.content))
    sys.exit(1 if CORRECT in table.failures and not arguments.is_child else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--only", help="parts, by name: " + ", ".join(part.name for part in parts_of(is_dry=True)))
    parser.add_argument("--profile", action="store_true", help=f"the parts {', '.join(PROFILES)}")
    parser.add_argument("--seconds", type=float, default=480, help="how long it may take; what is left out is said")
    parser.add_argument("--output", type=Path, help="the JSON's file, or a folder for it; what it has is gone on with")
    parser.add_argument("--commit", help="what was measured, where git cannot tell")
    parser.add_argument("--here", action="store_true", help="all parts in this process, as in a dry run")
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.here |= arguments.dry_run or arguments.is_child
    if not arguments.here and arguments.output is None:
        arguments.output = ROOT / "out" / "bench"
        arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.output is not None and arguments.output.is_dir():
        arguments.output /= results_name(about_device()["gpu"])
    names = {part.name for part in parts_of(is_dry=True)}
    if unknown := set((arguments.only or "").split(",")) - names - {""}:
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    return arguments


def _is_wanted(part: Part, arguments: argparse.Namespace) -> bool:
    if arguments.only:
        return part.name in arguments.only.split(",")
    if arguments.profile:
        return part.name in PROFILES
    return part.name not in EXTRAS


def _command(arguments: argparse.Namespace, part: Part) -> list[str]:
    """Measures a part and writes it to the same file."""
    command = [sys.executable, __file__, "--is-child", "--only", part.name, "--output", str(arguments.output)]
    return [*command, "--commit", arguments.commit] if arguments.commit else command


def run_apart(parts: list[Part], table: Table, seconds: float, command_of: Callable[[Part], list[str]]) -> None:
    """Each in a process, which is ended when it has taken several times as long as it should or there is no time."""
    end = time.monotonic() + seconds
    for part in parts:
        left = end - time.monotonic()
        if left < part.seconds:
            table.leave_out(part.name, f"not run: {left:.0f} s were left, and it takes about {part.seconds:.0f}")
            continue
        print(f"\n{part.name}:", flush=True)
        try:
            status = subprocess.run(
                command_of(part), timeout=min(left, _PATIENCE * part.seconds), check=False
            ).returncode
            failure = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired as error:
            failure = f"stopped after {error.timeout:.0f} s"
        table.reread()
        if failure is not None:
            table.fail(part.name, failure)


if __name__ == "__main__":
    main()
