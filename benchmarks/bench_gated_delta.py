"""Gated DeltaNet's operations on a CPU: the compiled kernels against torch's own operations, and against each other.

    python benchmarks/bench_gated_delta.py [--dtype float32] [--threads 2]

One layer of Qwen3.5-0.8B's shape (16 key heads and 16 heads of 128, 6,144 channels of width 4). All ways must agree
before any time is printed. A decode reads and writes each sequence's state: beside it stands a copy of as many bytes.
With one thread, the time is the thread's own: whatever else the machine does takes none of it. The last line is JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from report import print_result
from torch import Tensor

from headrace.kernels.causal_conv.native import causal_conv_native
from headrace.kernels.causal_conv.reference import causal_conv_reference
from headrace.kernels.gated_delta.native import gated_delta_rule_native, gated_rms_norm_native
from headrace.kernels.gated_delta.reference import gated_delta_rule_reference, gated_rms_norm_reference
from headrace.kernels.native import InstructionSet, instruction_set
from headrace.kernels.recurrent_states import StateSlots

KEY_HEADS, HEADS, HEAD_DIM, WIDTH = 16, 16, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * HEAD_DIM
STATE_BYTES = HEADS * HEAD_DIM * HEAD_DIM * 4
# A slow way is measured as often as there is time for.
ROUNDS, SECONDS = 100, 2.0


@dataclass(frozen=True)
class Batch:
    """How many tokens each sequence has, and whether its state stays in its slot."""

    query_lens: list[int]
    is_in_place: bool = True

    def slots(self) -> StateSlots:
        read, count = range(1, len(self.query_lens) + 1), len(self.query_lens)
        write = read if self.is_in_place else range(count + 1, 2 * count + 1)
        return StateSlots(self.query_lens, read, write, torch.device("cpu"))


BATCHES = {
    "1 decode": Batch([1]),
    "8 decodes": Batch([1] * 8),
    "64 decodes": Batch([1] * 64),
    "64 to other slots": Batch([1] * 64, is_in_place=False),
    "8 of 4 tokens": Batch([4] * 8),
    "a prompt of 512": Batch([512]),
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
    """The reference, the kernel, and what they are given."""

    reference: Callable[..., Tensor]
    native: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def copied(self) -> tuple[Any, ...]:
        return tuple(each.clone() if isinstance(each, Tensor) else each for each in self.arguments)

    def ways(self, dtype: torch.dtype) -> dict[str, Call]:
        """Those that this processor has; ends the run where they differ."""
        expected, tolerance = self.reference(*self.copied()).float(), TOLERANCES[dtype]
        ways: dict[str, Call] = {"torch": partial(self.reference, *self.copied())}
        for instructions in WAYS[dtype]:
            if instructions > instruction_set():
                continue
            native = partial(self.native, instructions=instructions)
            if not torch.allclose(native(*self.copied()).float(), expected, atol=tolerance, rtol=tolerance):
                sys.exit(f"{instructions.name} and torch differ: no speed is worth printing")
            ways[instructions.name] = partial(native, *self.copied())
        return ways


def operations(batch: Batch, dtype: torch.dtype) -> dict[str, Operation]:
    generator, slots = torch.Generator().manual_seed(0), batch.slots()
    tokens, num_slots = slots.num_tokens, 1 + max(slots.write)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    mixed, decay, beta = draw(tokens, CHANNELS), draw(tokens, HEADS), draw(tokens, HEADS)
    decay_scale, decay_bias = draw(2, HEADS).float()
    states = draw(num_slots, HEADS, HEAD_DIM, HEAD_DIM).float()
    taps, inputs = draw(CHANNELS, WIDTH), draw(num_slots, WIDTH - 1, CHANNELS)
    heads, gate, weight = draw(tokens, HEADS, HEAD_DIM), draw(tokens, HEADS * HEAD_DIM), draw(HEAD_DIM)
    rule = (mixed, decay, beta, decay_scale, decay_bias, states, slots)
    return {
        "rule": Operation(gated_delta_rule_reference, gated_delta_rule_native, rule),
        "convolution": Operation(causal_conv_reference, causal_conv_native, (mixed, taps, inputs, slots)),
        "norm": Operation(gated_rms_norm_reference, gated_rms_norm_native, (heads, gate, weight, 1e-6)),
    }


def copy_of_states(batch: Batch) -> Call:
    source = torch.ones(len(batch.query_lens), STATE_BYTES // 4)
    return partial(torch.zeros_like(source).copy_, source)


def microseconds(calls: dict[str, Call]) -> dict[str, float]:
    """The least of each, all in turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            if sum(times[name]) > SECONDS:
                continue
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: round(min(each) * 1e6, 1) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, batch in BATCHES.items():
        figures[name] = {}
        for kind, operation in operations(batch, dtype).items():
            ways = operation.ways(dtype) | ({"copy": copy_of_states(batch)} if kind == "rule" else {})
            times = figures[name][kind] = microseconds(ways)
            print(
                f"{name:20}{kind:12}" + "".join(f"{way:>13}{each:>9.0f} us" for way, each in times.items()), flush=True
            )
    print_result("gated_delta", {"dtype": options.dtype, "microseconds": figures})


if __name__ == "__main__":
    main()
