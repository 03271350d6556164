"""The GPU's figures against its limits: correctness, then kernels, then end to end, in under eight minutes on an H200.

    python benchmarks/gpu.py             # needs torch, triton, numpy, tokenizers and safetensors, and no installation
    python benchmarks/gpu.py --dry-run   # the same, tiny, on a CPU in Triton's interpreter: its figures mean nothing

Weights are random: speed does not read them. No speed is printed before the kernels agree with their references and
the engine's greedy tokens on the GPU are those on the CPU in float32. The goals are those the project set itself
before there was a figure, by number; what of them was not measured is listed with the reason. transformers, vLLM and
FlashInfer are compared with where they are installed. The last line is JSON.
"""

import argparse
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_table import BUDGET_SECONDS, Table
from report import ROOT, print_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--no-peers", action="store_true", help="without transformers, vLLM and FlashInfer")
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
    print_result("gpu", _run(arguments.dry_run, not arguments.no_peers), arguments.output)


def _run(is_dry: bool, with_peers: bool) -> dict[str, Any]:
    from gpu_engine import check_engine
    from gpu_flashinfer import flashinfer_line
    from gpu_kernels import DRY as DRY_KERNELS
    from gpu_kernels import GPU as GPU_KERNELS
    from gpu_kernels import attention_lines, check_attention, linear_lines, measure_limits, small_lines
    from gpu_workloads import DRY, GPU, EngineGoals

    table, sizes = Table(), DRY_KERNELS if is_dry else GPU_KERNELS
    check_attention(sizes)
    check_engine(sizes.device)
    print(f"correct: attention, and greedy tokens in float32 ({BUDGET_SECONDS - table.seconds_left:.0f} s)")
    limits = measure_limits(sizes)
    print(f"limits: {limits.bytes_per_second / 1e12:.2f} TB/s copied, {limits.flops_per_second / 1e12:.0f} TFLOP/s")
    table.attempt("goals 1, 2, 3", 60, lambda: table.add(*attention_lines(sizes, limits)))
    if with_peers and find_spec("flashinfer") is not None:
        table.attempt("FlashInfer", 20, lambda: table.add(flashinfer_line(sizes)))
    else:
        table.leave_out("FlashInfer", "it is not installed here, or not asked for")
    goals = EngineGoals(table, DRY if is_dry else GPU, sizes.device, limits)
    goals.measure()
    table.attempt("quantised linears", 30, lambda: table.add(*linear_lines(sizes, limits)))
    table.attempt("small kernels", 20, lambda: table.add(*small_lines(sizes, limits)))
    goals.compare(with_peers)
    return {
        "gpu": "none (dry run)" if is_dry else torch.cuda.get_device_name(),
        "seconds": round(BUDGET_SECONDS - table.seconds_left),
        "limits": asdict(limits),
        "not_run": table.not_run,
        "lines": [asdict(line) for line in table.lines],
    }


if __name__ == "__main__":
    main()
