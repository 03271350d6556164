"""Attention over a shared prefix, read once or by each sequence: where sharing pays on this machine.

    python benchmarks/bench_shared_prefix.py

One layer of a SmolLM2-135M shape (9 query and 3 key-value heads of 64). Prints, for each number of new tokens of a
sequence, the time without sharing over the time with it. The gate in kernels/paged_attention/prefix_groups.py is set
from this table. Both must agree before any time is printed. The last line is JSON.
"""

import sys
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from report import print_result

from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention import prefix_groups as gate
from headrace.kernels.paged_attention.cpu import paged_attention_padded

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
OWN_TOKENS = 40
ROUNDS = 9
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def batch(num_sequences: int, new_tokens: int, prefix_tokens: int) -> AttentionMetadata:
    """Sequences of `OWN_TOKENS` tokens after a common prefix, their last `new_tokens` being new."""
    prefix = list(range(prefix_tokens // BLOCK_SIZE))
    own_blocks = -(-max(OWN_TOKENS, new_tokens) // BLOCK_SIZE)
    tables = [
        prefix + [len(prefix) + index * own_blocks + block for block in range(own_blocks)]
        for index in range(num_sequences)
    ]
    context = prefix_tokens + max(OWN_TOKENS, new_tokens)
    return AttentionMetadata([new_tokens] * num_sequences, [context] * num_sequences, tables, BLOCK_SIZE)


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times) * 1000


def compare(num_sequences: int, new_tokens: int, prefix_tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds without and with sharing, once a step's layout is known."""
    layout = batch(num_sequences, new_tokens, prefix_tokens)
    num_blocks = max(map(max, layout.block_tables)) + 1
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    query = torch.randn(layout.num_tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)

    def run(is_shared: bool) -> torch.Tensor:
        # A window that hides nothing takes the path without sharing.
        keys, values = caches
        return paged_attention_padded(query, keys, values, layout, HEAD_DIM**-0.5, None if is_shared else 10**6)

    if not torch.allclose(run(True).float(), run(False).float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]):
        sys.exit("attention with and without sharing differs: no speed is worth printing")
    return milliseconds(lambda: run(False)), milliseconds(lambda: run(True))


def main() -> None:
    gate.MIN_SPARED_TOKENS, gate.MAX_SHARING_QUERIES = 0, 10**6
    figures: list[dict[str, Any]] = []
    queries = (1, 4, 16, 32, 64)
    for dtype in (torch.float32, torch.bfloat16):
        print(f"{dtype}: time without sharing / time with, by new tokens a sequence")
        print(f"{'sequences':>10}{'prefix':>8}" + "".join(f"{count:>8}" for count in queries))
        for num_sequences, prefix_tokens in product((2, 8, 32, 128), (64, 256, 1024)):
            ratios = []
            for new_tokens in queries:
                if num_sequences * new_tokens > 4096:
                    continue
                plain, shared = compare(num_sequences, new_tokens, prefix_tokens, dtype)
                ratios.append(plain / shared)
                figures.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "sequences": num_sequences,
                        "prefix_tokens": prefix_tokens,
                        "new_tokens": new_tokens,
                        "plain_ms": round(plain, 3),
                        "shared_ms": round(shared, 3),
                    }
                )
            print(f"{num_sequences:>10}{prefix_tokens:>8}" + "".join(f"{ratio:>8.2f}" for ratio in ratios))
    print_result("shared_prefix", {"figures": figures})


if __name__ == "__main__":
    main()
