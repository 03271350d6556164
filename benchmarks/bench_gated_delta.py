"""Gated DeltaNet's operations on a CPU: the compiled kernels against torch's own operations, and against each other.

    python benchmarks/bench_gated_delta.py [--dtype float32] [--threads 2]

One layer of Qwen3.5-0.8B's shape (16 key heads and 16 heads of 128, 6,144 channels of width 4). All ways must agree
before any time is printed. A decode reads and writes each sequence's state: its speed stands beside that of a copy of
as many bytes. The last line is JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from report import print_result
from torch import Tensor

from headrace.kernels.gated_delta import StateSlots
from headrace.kernels.gated_delta.native import causal_conv_native, gated_delta_rule_native, gated_rms_norm_native
from headrace.kernels.gated_delta.reference import (
    causal_conv_reference,
    gated_delta_rule_reference,
    gated_rms_norm_reference,
)
from headrace.kernels.native import InstructionSet, instruction_set

KEY_HEADS, HEADS, HEAD_DIM, WIDTH = 16, 16, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * HEAD_DIM
STATE_BYTES = HEADS * HEAD_DIM * HEAD_DIM * 4
ROUNDS = 7
BATCHES = {
    "1 decode": [1],
    "8 decodes": [1] * 8,
    "64 decodes": [1] * 64,
    "8 of 4 tokens": [4] * 8,
    "a prompt of 512": [512],
}
# By the dtype: how far apart the ways may be, and what the compiled kernels compute with.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
WAYS = {
    torch.bfloat16: (InstructionSet.AVX512_BF16,),
    torch.float32: (InstructionSet.AVX2, InstructionSet.AVX512),
}
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Operation:
    """The reference and the kernel, and what each call is given: no call changes what a later one finds."""

    reference: Callable[..., Tensor]
    native: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def ways(self, dtype: torch.dtype) -> dict[str, Call]:
        """Those that this processor has; ends the run where they differ."""
        expected, tolerance = self.reference(*self.arguments).float(), TOLERANCES[dtype]
        ways: dict[str, Call] = {"torch": partial(self.reference, *self.arguments)}
        for instructions in WAYS[dtype]:
            if instructions > instruction_set():
                continue
            native = partial(self.native, *self.arguments, instructions=instructions)
            if not torch.allclose(native().float(), expected, atol=tolerance, rtol=tolerance):
                sys.exit(f"{instructions.name} and torch differ: no speed is worth printing")
            ways[instructions.name] = native
        return ways


def operations(query_lens: list[int], dtype: torch.dtype) -> dict[str, Operation]:
    """Each sequence goes on from one slot and leaves its state in another."""
    generator, count = torch.Generator().manual_seed(0), len(query_lens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(query_lens)
    slots = StateSlots(query_lens, range(1, count + 1), range(count + 1, 2 * count + 1), torch.device("cpu"))
    mixed, decay, beta = draw(tokens, CHANNELS).to(dtype), draw(tokens, HEADS).to(dtype), draw(tokens, HEADS).to(dtype)
    heads, gate = draw(tokens, HEADS, HEAD_DIM).to(dtype), draw(tokens, HEADS * HEAD_DIM).to(dtype)
    weight, states = draw(CHANNELS, WIDTH).to(dtype), draw(2 * count + 1, WIDTH - 1, CHANNELS).to(dtype)
    rule_states = draw(2 * count + 1, HEADS, HEAD_DIM, HEAD_DIM)
    rule = (mixed, decay, beta, draw(HEADS), draw(HEADS), rule_states, slots)
    return {
        "rule": Operation(gated_delta_rule_reference, gated_delta_rule_native, rule),
        "convolution": Operation(causal_conv_reference, causal_conv_native, (mixed, weight, states, slots)),
        "norm": Operation(
            gated_rms_norm_reference, gated_rms_norm_native, (heads, gate, draw(HEAD_DIM).to(dtype), 1e-6)
        ),
    }


def copies(query_lens: list[int]) -> Call:
    """Of as many bytes as the sequences' states have."""
    source = torch.ones(len(query_lens), STATE_BYTES // 4)
    target = torch.zeros_like(source)
    return partial(target.copy_, source)


def microseconds(calls: dict[str, Call]) -> dict[str, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for batch, query_lens in BATCHES.items():
        figures[batch] = {}
        for name, operation in operations(query_lens, dtype).items():
            ways = operation.ways(dtype) | ({"copy": copies(query_lens)} if name == "rule" else {})
            times = figures[batch][name] = microseconds(ways)
            print(
                f"{batch:18}{name:12}" + "".join(f"{way:>14}{each:>9.0f} us" for way, each in times.items()), flush=True
            )
    print_result("gated_delta", {"dtype": options.dtype, "microseconds": figures})


if __name__ == "__main__":
    main()
