"""The figures of layers with recurrent states for `gpu.py`: their kernels against copying, and decodes with graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from gpu_engine import Workload, check_engine, load_for, output_rates
from gpu_kernels import Limits, Sizes, assert_near, timed, tolerance_of
from gpu_table import Line
from torch import Tensor

from headrace.kernels.causal_conv import causal_conv
from headrace.kernels.causal_conv.reference import causal_conv_reference
from headrace.kernels.gated_delta import gated_delta_rule, gated_rms_norm
from headrace.kernels.gated_delta.reference import gated_delta_rule_reference, gated_rms_norm_reference
from headrace.kernels.mamba2 import grouped_gated_rms_norm, selective_scan
from headrace.kernels.mamba2.reference import grouped_gated_rms_norm_reference, selective_scan_reference
from headrace.kernels.recurrent_states import StateSlots

_EPS = 1e-6
# Lengths of sequences that go each of the kernels' ways, and end within a chunk.
_CHECKED = (1, 1, 5, 63, 130)
_SMALL = "gate states"


@dataclass(frozen=True)
class StateSizes:
    """A layer's heads, how many sequences decode, and the prompts of a prefill; then a model and its workload.

    scan: of Mamba-2 groups, heads, state_dim and head_dim. work: requests, shared and own tokens of a prompt, tokens
    out.
    """

    key_heads: int
    heads: int
    dim: int
    width: int
    scan: tuple[int, int, int, int]
    num_decodes: int
    prompts: tuple[int, ...]
    model: str
    work: tuple[int, int, int, int]


# As published for Qwen3-Next-80B-A3B, Nemotron 3 Nano and Qwen3.5-9B.
GPU = StateSizes(16, 32, 128, 4, (8, 64, 128, 64), 256, (2048,) * 4, "M3", (256, 512, 32, 64))
DRY = StateSizes(1, 2, 16, 3, (1, 2, 16, 16), 3, (70,), _SMALL, (3, 32, 8, 3))


class StateCase:
    """What a layer's three operations, and two of Mamba-2's, are given for sequences of these lengths, with states."""

    def __init__(self, sizes: Sizes, states: StateSizes, query_lens: tuple[int, ...]) -> None:
        generator = torch.Generator(sizes.device).manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=sizes.device).to(dtype)

        count, tokens, heads, dim = len(query_lens), sum(query_lens), states.heads, states.dim
        channels = (2 * states.key_heads + heads) * dim
        own = range(1, count + 1)
        slots = StateSlots(query_lens, own, own, sizes.device)
        mixed = draw(tokens, channels)
        self.states = draw(1 + count, heads, dim, dim, dtype=torch.float32)
        scale, bias = draw(2, heads, dtype=torch.float32)
        self.rule = (mixed, draw(tokens, heads), draw(tokens, heads), scale - 2, bias, self.states, slots)
        self.conv = (mixed, draw(channels, states.width), draw(1 + count, states.width - 1, channels), slots)
        self.norm = (draw(tokens, heads, dim), draw(tokens, heads * dim), draw(dim), _EPS)
        groups, scan_heads, state_dim, head_dim = states.scan
        inner = scan_heads * head_dim
        self.scan_states = draw(1 + count, scan_heads, state_dim, head_dim, dtype=torch.float32)
        factors = draw(3, scan_heads, dtype=torch.float32) - 2
        scanned = draw(tokens, inner + 2 * groups * state_dim)
        self.scan = (scanned, draw(tokens, scan_heads), *factors, self.scan_states, slots)
        self.scan_norm = (draw(tokens, inner), draw(tokens, inner), draw(inner), _EPS, groups)
        self.scan_bytes = 2 * self.scan_states[1:].nbytes + scanned.nbytes + self.scan_norm[0].nbytes
        # Of decodes each state is read and written; of prompts that is little beside their tokens.
        self.rule_bytes = 2 * self.states[1:].nbytes + (mixed.numel() + tokens * heads * dim) * mixed.itemsize
        self.conv_bytes = 2 * mixed.nbytes
        self.norm_bytes = 3 * self.norm[1].nbytes

    def operations(self) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
        """A name, the bytes that have to be read and written, and a call, which changes states in place."""
        yield "delta rule", self.rule_bytes, partial(gated_delta_rule, *self.rule)
        yield "convolution", self.conv_bytes, partial(causal_conv, *self.conv)
        yield "norm and gates", self.norm_bytes, partial(gated_rms_norm, *self.norm)
        yield "Mamba-2's scan", self.scan_bytes, partial(selective_scan, *self.scan)
        yield "Mamba-2's norm and gates", 3 * self.scan_norm[0].nbytes, partial(grouped_gated_rms_norm, *self.scan_norm)


def check_states(sizes: Sizes, states: StateSizes) -> None:
    """A layer's kernels against their references, then greedy tokens against the CPU's. Raises `AssertionError`."""
    case, expected = StateCase(sizes, states, _CHECKED), StateCase(sizes, states, _CHECKED)
    tolerance = tolerance_of(sizes)
    assert_near(causal_conv(*case.conv), causal_conv_reference(*expected.conv), tolerance)
    assert_near(gated_delta_rule(*case.rule), gated_delta_rule_reference(*expected.rule), tolerance)
    assert_near(case.states[1:], expected.states[1:], tolerance)
    assert_near(gated_rms_norm(*case.norm), gated_rms_norm_reference(*expected.norm), tolerance)
    assert_near(selective_scan(*case.scan), selective_scan_reference(*expected.scan), tolerance)
    assert_near(case.scan_states[1:], expected.scan_states[1:], tolerance)
    normed = grouped_gated_rms_norm_reference(*expected.scan_norm)
    assert_near(grouped_gated_rms_norm(*case.scan_norm), normed, tolerance)
    check_engine(sizes.device, _SMALL)


def state_lines(sizes: Sizes, states: StateSizes, limits: Limits) -> Iterator[Line]:
    """One layer's operations, as a decode and a prefill have them; then a model's rows with graphs and without."""
    batches = {f"{states.num_decodes} decodes": (1,) * states.num_decodes}
    batches[f"{len(states.prompts)} prompts of {states.prompts[0]}"] = states.prompts
    for batch, query_lens in batches.items():
        for name, num_bytes, call in StateCase(sizes, states, query_lens).operations():
            taken = timed(call, sizes)
            fraction = num_bytes / taken.median / limits.bytes_per_second
            title = f"{name}, {batch}: fraction of copy bandwidth"
            yield Line(title, taken.median * 1e6, "us", fraction, spread=taken.spread)
    work = Workload.shared(states.model, *states.work)
    graphed, eager = (
        median(output_rates(load_for(states.model, sizes.device, [work], enforce_eager=is_eager), work, 2))
        for is_eager in (False, True)
    )
    yield Line(f"{states.model}, shared prompt: times as fast as without graphs", graphed, "tok/s", graphed / eager)
