"""Which shapes attention's kernels are the fastest in on this GPU, in under three minutes.

    python benchmarks/gpu_tuning.py             # needs torch, triton and numpy; writes nothing
    python benchmarks/gpu_tuning.py --dry-run   # the same, tiny, on a CPU in Triton's interpreter

The first of each is what is chosen now; what is faster goes into `kernel_shapes.py`. Narrow shapes are timed on plain
decodes and wide ones on a prefill; the best three of each then together on decodes that share prefixes, where one
follows the other. A shape whose output differs from that of the first is left out. How long an item of a prefix takes
to start decides into how many a prefix is cut: three assumptions about that are timed too. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from gpu_device import prepare
from report import environment

_BEST = 3
# In keys: as if it took nothing, and so much that nothing is cut into more items than run at once.
_NOTHING, _MUCH = 0, 2**20


@dataclass(frozen=True)
class Trial:
    """Two shapes of the kernels, and the seconds a workload takes with them."""

    workload: str
    shapes: Any
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=170, help="how long it may take; no trial begins afterwards")
    arguments = parser.parse_args()
    prepare(arguments.dry_run)
    from gpu_kernels import DRY, GPU

    sizes = DRY if arguments.dry_run else GPU
    tuning = Tuning(sizes, time.monotonic() + arguments.seconds)
    tuning.run(arguments.dry_run)
    print(json.dumps({"benchmark": "gpu_tuning", **environment(), **tuning.result()}))


class Tuning:
    """Times candidates until `deadline`, and remembers the best of each workload."""

    def __init__(self, sizes: Any, deadline: float) -> None:
        self._sizes, self._deadline = sizes, deadline
        self._trials: list[Trial] = []
        self._starts: list[dict[str, float]] = []
        self._num_left_out = 0

    def run(self, is_dry: bool) -> None:
        from gpu_kernels import AttentionCase, always, never

        sizes = self._sizes
        narrow, wide = candidates(sizes.attention.kernels(sizes.device))
        if is_dry:
            narrow, wide = narrow[:2], wide[:1]
        rows, context = sizes.decode_batch, sizes.decode_context
        plain = AttentionCase.build(sizes, [1] * rows, [context] * rows, [range(0)] * rows)
        prefill = AttentionCase.build(sizes, [sizes.prefill_tokens], [sizes.prefill_tokens], [range(0)])
        decodes, prefills = f"decode, {rows} of {context}", f"prefill of {sizes.prefill_tokens}"
        self._time(decodes, plain, never, [(each, wide[0]) for each in narrow])
        self._time(prefills, prefill, never, [(narrow[0], each) for each in wide])
        pairs = [(first.narrow, second.wide) for first, second in product(self._best(decodes), self._best(prefills))]
        for prefix in sizes.prefixes:
            shared = AttentionCase.decode(sizes, prefix)
            self._time_starts(prefix, shared)
            self._time(f"decode, {sizes.batch} sharing {prefix}", shared, always, pairs)

    def result(self) -> dict[str, Any]:
        ranked = {trial.workload: [] for trial in self._trials}  # type: dict[str, list[dict[str, Any]]]
        for trial in sorted(self._trials, key=lambda trial: trial.seconds):
            ranked[trial.workload].append({"microseconds": round(trial.seconds * 1e6, 1), **asdict(trial.shapes)})
        return {"trials_left_out": self._num_left_out, "starts": self._starts, "ranked": ranked}

    def _time_starts(self, prefix: int, case: Any) -> None:
        """With the shapes that are chosen now. Prints a line each."""
        from gpu_kernels import always, seconds

        from headrace.kernels.paged_attention import plan

        chosen = plan._WIDE_START
        for start in (_NOTHING, chosen, _MUCH):
            if time.monotonic() > self._deadline:
                self._num_left_out += 1
                continue
            plan._WIDE_START = start
            taken = seconds(case.runner(self._sizes, always)[0], self._sizes)
            self._starts.append({"prefix": prefix, "start": start, "microseconds": round(taken * 1e6, 1)})
            print(f"  {taken * 1e6:9.1f} us  a prefix of {prefix}, an item's start as {start} keys", flush=True)
        plan._WIDE_START = chosen

    def _best(self, workload: str) -> list[Any]:
        """The fastest shapes so far; none where there was no time for the workload."""
        trials = sorted((each for each in self._trials if each.workload == workload), key=lambda each: each.seconds)
        return [each.shapes for each in trials[:_BEST]]

    def _time(self, workload: str, case: Any, gate: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Prints a line a pair of shapes."""
        from gpu_kernels import assert_near, seconds

        from headrace.kernels.paged_attention.kernel_shapes import KernelShapes

        print(workload)
        expected = None
        for narrow, wide in pairs:
            if time.monotonic() > self._deadline:
                self._num_left_out += 1
                continue
            shapes = KernelShapes(narrow, wide)
            try:
                call, output = _runner(self._sizes, case, gate, shapes)
                taken = seconds(call, self._sizes)
                expected = output if expected is None else expected
                assert_near(output, expected, 2e-2)
            # One that needs more than the GPU has, or is wrong, costs its own figure and no other's.
            except Exception as error:  # noqa: BLE001
                print(f"  left out, {type(error).__name__} {' '.join(str(error).split())[:80]}: {_words(shapes)}")
                self._num_left_out += 1
                continue
            self._trials.append(Trial(workload, shapes, taken))
            print(f"  {taken * 1e6:9.1f} us  {_words(shapes)}", flush=True)


def candidates(chosen: Any) -> tuple[list[Any], list[Any]]:
    """Narrow shapes and wide ones for heads of up to 128 in 16 bits, each beginning with what is `chosen` now."""
    from headrace.kernels.paged_attention.kernel_shapes import KernelShape

    rows = chosen.narrow.rows
    narrow = [
        chosen.narrow,
        KernelShape(rows, 32, 1, 5, 8, 255),
        KernelShape(rows, 32, 1, 3, 8, 255),
        KernelShape(rows, 16, 1, 3, 8, 255),
        KernelShape(rows, 32, 2, 5, 5, 160),
        KernelShape(rows, 32, 4, 7, 4, 128),
        KernelShape(rows, 64, 4, 3, 4, 128),
        KernelShape(rows, 64, 4, 5, 3, 168),
        KernelShape(rows, 128, 4, 3, 2, 255),
    ]
    wide = [
        chosen.wide,
        KernelShape(128, 128, 8, 3, 1, 255),
        KernelShape(128, 64, 8, 5, 1, 255),
        KernelShape(256, 64, 8, 5, 1, 255),
        KernelShape(256, 64, 16, 5, 1, 128),
        KernelShape(128, 32, 4, 5, 2, 255),
        KernelShape(64, 64, 4, 5, 2, 255),
        KernelShape(64, 32, 4, 5, 3, 168),
    ]
    return narrow, wide


def _runner(sizes: Any, case: Any, gate: Any, shapes: Any) -> tuple[Callable[[], object], torch.Tensor]:
    """A call that attends, and the tensor it fills."""
    from headrace.kernels.paged_attention.device_plan import DevicePlan
    from headrace.kernels.paged_attention.planning import plan_attention
    from headrace.kernels.paged_attention.triton import attend_planned

    shape = replace(sizes.attention, tuned=shapes)
    plan = plan_attention(case.metadata, shape, None, gate)
    held = DevicePlan.holding(plan, sizes.heads, sizes.head_dim, sizes.device)
    output = torch.full_like(case.query, torch.nan)
    keys, values = case.caches
    scale = sizes.head_dim**-0.5
    return lambda: attend_planned(case.query, keys, values, held, scale, output, tuned=shapes), output


def _words(shapes: Any) -> str:
    return "; ".join(
        f"{name} {each['rows']}x{each['tile']} warps {each['num_warps']} stages {each['num_stages']} "
        f"programs {each['programs_per_processor']} registers {each['max_registers']}"
        for name, each in asdict(shapes).items()
    )


if __name__ == "__main__":
    main()
