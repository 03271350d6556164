"""Attention of one layer on a CPU: the compiled kernels against torch's own operations, and against each other.

    python benchmarks/bench_attention.py [--dtype float32] [--threads 2]

SmolLM2-135M's shape (9 query and 3 key-value heads of 64), in the batches that the engine's workloads are made of. All
ways must agree before any time is printed. The last line is JSON.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from report import print_result
from torch import Tensor

from headrace.kernels.native import InstructionSet, instruction_set
from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention.cpu import paged_attention_padded
from headrace.kernels.paged_attention.native import paged_attention_native

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
ROUNDS = 7
# By the dtype: how far apart the ways may be, and what the compiled kernels compute with.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
WAYS = {
    torch.bfloat16: (InstructionSet.AVX512_BF16, InstructionSet.AMX),
    torch.float32: (InstructionSet.AVX2, InstructionSet.AVX512),
}


def layout(new_and_own: list[tuple[int, int]], prefix_tokens: int = 0) -> AttentionMetadata:
    """Sequences of so many new and so many own tokens after a common prefix."""
    prefix = list(range(prefix_tokens // BLOCK_SIZE))
    tables, used = [], len(prefix)
    for _, own in new_and_own:
        count = -(-own // BLOCK_SIZE)
        tables.append(prefix + list(range(used, used + count)))
        used += count
    contexts = [prefix_tokens + own for _, own in new_and_own]
    return AttentionMetadata([new for new, _ in new_and_own], contexts, tables, BLOCK_SIZE)


def batches() -> dict[str, AttentionMetadata]:
    lengths = random.Random(0)
    return {
        "W1, 60 chunks of 32 after 512": layout([(32, 32)] * 60, 512),
        "W1, 128 decodes after 512": layout([(1, 36)] * 128, 512),
        "W2, 64 decodes": layout([(1, lengths.randint(20, 300)) for _ in range(64)]),
        "W2, 40 prompts": layout([(length, length) for length in (lengths.randint(20, 200) for _ in range(40))]),
        "W3, 64 decodes after 2048": layout([(1, 72)] * 64, 2048),
        "W4, one decode of 160": layout([(1, 160)]),
        "one decode of 8192": layout([(1, 8192)]),
    }


def microseconds(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """The median of each, all in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            # The first warms up.
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: round(median(each) * 1e6, 1) for name, each in times.items()}


def compare(metadata: AttentionMetadata, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds by torch's operations, and by the compiled kernel on each instruction set there is."""
    num_blocks = max(map(max, metadata.block_tables)) + 1
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    query = torch.randn(metadata.num_tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
    arguments = (query, caches[0], caches[1], metadata, HEAD_DIM**-0.5)
    expected = paged_attention_padded(*arguments).float()
    calls: dict[str, Callable[[], Tensor]] = {"torch": lambda: paged_attention_padded(*arguments)}
    for instructions in WAYS[dtype]:
        if instructions > instruction_set():
            continue
        native = partial(paged_attention_native, *arguments, instructions=instructions)
        if not torch.allclose(native().float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]):
            sys.exit(f"{instructions.name} and torch differ: no speed is worth printing")
        calls[instructions.name] = native
    return microseconds(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    for name, metadata in batches().items():
        figures[name] = compare(metadata, getattr(torch, options.dtype))
        print(f"{name:32}" + "".join(f"{way:>14}{time:>9.0f} us" for way, time in figures[name].items()), flush=True)
    print_result("attention", {"threads": torch.get_num_threads(), "dtype": options.dtype, "microseconds": figures})


if __name__ == "__main__":
    main()
