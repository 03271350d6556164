"""The GPU's figures against its limits: correctness, then kernels, then end to end, in under eight minutes on an H200.

    python benchmarks/gpu.py             # needs torch, triton, numpy, tokenizers and safetensors, and no installation
    python benchmarks/gpu.py --dry-run   # the same, tiny, on a CPU in Triton's interpreter: its figures mean nothing

Weights are random: speed does not read them. No speed is printed before the kernels agree with their references and
the engine's greedy tokens on the GPU are those on the CPU in float32. The goals are those the project set itself
before there was a figure. The last line is JSON.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from report import ROOT, print_result

BUDGET_SECONDS = 8 * 60
# Model, requests, shared and own tokens of a prompt, tokens out, the ceiling in output tokens/s, the goal.
GPU_RUNS = (
    ("M2", "shared prompt", 256, 2048, 128, 128, 339_000.0, 0.65),
    ("M2", "labels", 1024, 2048, 128, 8, 6_360.0 * 8, 0.70),
    ("llama-3-8b", "shared prompt", 256, 2048, 128, 128, 22_700.0, 0.65),
    ("llama-3-8b", "labels", 1024, 2048, 128, 8, 384.0 * 8, 0.70),
)
DRY_RUNS = (("gate", "shared prompt", 3, 32, 8, 4, 1e9, 0.65),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="write the JSON here as well")
    arguments = parser.parse_args()
    if arguments.dry_run:
        # Before triton is imported, which reads it then.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        sys.exit("torch finds no CUDA GPU here; --dry-run runs the script on a CPU")
    if find_spec("headrace") is None:
        # Where the package is not installed: a folder of links that is called headrace.
        sys.path.append(str(ROOT / "typings"))
    print_result("gpu", _run(arguments.dry_run), arguments.output)


def _run(is_dry: bool) -> dict[str, Any]:
    from gpu_engine import check_engine, engine_line
    from gpu_kernels import DRY, GPU, attention_lines, check_attention, linear_lines, measure_limits, small_lines

    started = time.monotonic()
    sizes = DRY if is_dry else GPU
    check_attention(sizes)
    check_engine(sizes.device)
    print(f"correct: attention, and greedy tokens in float32 ({time.monotonic() - started:.0f} s)")
    limits = measure_limits(sizes)
    print(f"limits: {limits.bytes_per_second / 1e12:.2f} TB/s copied, {limits.flops_per_second / 1e12:.0f} TFLOP/s")
    lines = [*attention_lines(sizes, limits), *linear_lines(sizes, limits), *small_lines(sizes, limits)]
    _print(lines)
    left_out = []
    for run in DRY_RUNS if is_dry else GPU_RUNS:
        # A run of the large model takes about a minute, drawing its weights included.
        if time.monotonic() - started > BUDGET_SECONDS - 90:
            left_out.append(f"{run[0]}, {run[1]}")
            continue
        line = engine_line(sizes.device, *run)
        _print([line])
        lines.append(line)
    if left_out:
        print("left out for want of time:", "; ".join(left_out))
    return {
        "gpu": "none (dry run)" if is_dry else torch.cuda.get_device_name(),
        "seconds": round(time.monotonic() - started),
        "limits": asdict(limits),
        "left_out": left_out,
        "lines": [asdict(line) for line in lines],
    }


def _print(lines: list[Any]) -> None:
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:8.3f}"
        goal = "" if line.goal is None else f"  goal {line.goal:g}"
        print(f"{line.name:<66}{line.value:>12.3f} {line.unit:<9}{ratio}{goal}", flush=True)


if __name__ == "__main__":
    main()
