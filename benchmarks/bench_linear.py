"""Products with one layer's weight on a CPU, by how it is kept: microseconds a call, and times the speed of torch's.

    python benchmarks/bench_linear.py [--shapes 4096x2048,3072x576] [--rows 1,4,16,64,256] [--rounds 3] [--output FILE]

In float32 and bfloat16: torch's `F.linear`, ours with the weight in that dtype, with four bits in groups of 128 (W4A16)
and with int8 (W8A8, activations quantised in the call). The ways take turns, each over copies of the weight that
together are larger than the caches, as a model's layers are. Before any time is printed, four bits must give what
the weight that they stand for gives. Shapes are outputs x inputs. The last line is JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import print_result
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.linear import Int4Weight, Linear, supports_grouped, supports_int8
from headrace.kernels.linear.grouped import GroupedProduct
from headrace.kernels.linear.plain import plain_product

GROUP_SIZE = 128
# Of all copies of a weight in two bytes: several times the last level's cache.
COPIES_BYTES = 256 << 20
SECONDS_A_TURN = 0.2
PRECISIONS = (torch.float32, torch.bfloat16)
Way = Callable[[Tensor], Tensor]


def drawn_weight(outputs: int, inputs: int, generator: torch.Generator) -> Int4Weight:
    values = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // GROUP_SIZE)
    scales = ((torch.rand(groups, outputs, generator=generator) + 0.5) * inputs**-0.5 / 8).half()
    zeros = torch.randint(6, 11, (groups, outputs), generator=generator, dtype=torch.uint8)
    return Int4Weight.pack(values, scales, zeros, GROUP_SIZE)


def int8_of(weight: Tensor) -> Way:
    product = Linear(weight)
    product.prepack(int8=True)
    return product


def ways_of(weights: Sequence[Int4Weight], dtype: torch.dtype) -> dict[str, list[Way]]:
    """Each way that this processor has, once for each weight."""
    plain = [weight.dequantized(dtype) for weight in weights]
    device = plain[0].device
    ways: dict[str, list[Way]] = {
        "torch": [partial(linear, weight=weight) for weight in plain],
        "ours": [plain_product(weight, None) for weight in plain],
    }
    if supports_grouped(dtype, device):
        ways["4 bits"] = [GroupedProduct(weight, None, dtype) for weight in weights]
    if supports_int8(dtype, device):
        ways["int8"] = [int8_of(weight) for weight in plain]
    return ways


def check(ways: dict[str, list[Way]], x: Tensor) -> None:
    """Four bits against the dequantised weight, both as this processor computes them."""
    if "4 bits" in ways:
        packed, plain = (ways[way][0](x).float() for way in ("4 bits", "ours"))
        error = (packed - plain).norm() / plain.norm()
        if not error < (1e-5 if x.dtype == torch.float32 else 1e-2):
            sys.exit(f"four bits give other products, by {error:.1e} of their length: no speed is worth printing")


def turn(calls: Sequence[Way], x: Tensor) -> float:
    """Seconds a call, over all copies and for some time."""
    for call in calls:
        call(x)
    start, count = time.perf_counter(), 0
    for call in islice(cycle(calls), 1 << 20):
        call(x)
        count += 1
        if count % len(calls) == 0 and time.perf_counter() - start > SECONDS_A_TURN:
            break
    return (time.perf_counter() - start) / count


def measure(outputs: int, inputs: int, rows: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    copies = max(1, COPIES_BYTES // (2 * outputs * inputs))
    weights = [drawn_weight(outputs, inputs, generator) for _ in range(copies)]
    figures = []
    for dtype in PRECISIONS:
        ways = ways_of(weights, dtype)
        for count in rows:
            x = torch.randn(count, inputs, generator=generator).to(dtype)
            check(ways, x)
            turns = [{way: turn(calls, x) for way, calls in ways.items()} for _ in range(rounds)]
            for way in ways:
                took = median(each[way] for each in turns)
                ratios = sorted(each["torch"] / each[way] for each in turns)
                figures.append(
                    {
                        "shape": f"{outputs}x{inputs}",
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": count,
                        "way": way,
                        "us": round(took * 1e6, 1),
                        "gops": round(2 * count * outputs * inputs / took / 1e9, 1),
                        "times_torch": [round(ratio, 2) for ratio in (median(ratios), ratios[0], ratios[-1])],
                    }
                )
                print(line_of(figures[-1]), flush=True)
    return figures


def line_of(figure: dict[str, Any]) -> str:
    middle, least, most = figure["times_torch"]
    named = f"{figure['shape']:>12}{figure['dtype']:>10}{figure['rows']:>6}{figure['way']:>8}"
    return f"{named}{figure['us']:>11.1f}{figure['gops']:>9.1f}{middle:>8.2f} ({least:.2f} to {most:.2f})"


def shape(text: str) -> tuple[int, int]:
    outputs, inputs = map(int, text.split("x"))
    return outputs, inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x2048,3072x576")
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="where to write the JSON line as well")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    print(f"{'shape':>12}{'dtype':>10}{'rows':>6}{'way':>8}{'us':>11}{'GO/s':>9}{'times torch':>16}")
    figures = [
        figure
        for outputs, inputs in map(shape, options.shapes.split(","))
        for figure in measure(outputs, inputs, rows, options.rounds)
    ]
    print_result("linear", {"figures": figures}, options.output)


if __name__ == "__main__":
    main()
