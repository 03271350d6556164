"""The figures of a mixture's experts for `gpu.py`: against what their bytes or products take, a loop, and torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpu_device import timing_with_waits
from gpu_kernels import Limits, Sizes, assert_near, timed, tolerance_of
from gpu_table import Line
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.activation import silu_and_mul
from headrace.kernels.linear import ScaledWeight
from headrace.kernels.linear.gates import Gate
from headrace.kernels.linear.quantized_reference import quantize_rows_reference
from headrace.kernels.linear.triton import quantize_rows_triton, scaled_linear_triton
from headrace.kernels.moe import StackedExperts, mix_experts, mix_experts_reference, mix_stacked_experts
from headrace.kernels.moe.stacked_experts import ByteMatrices, Matrices, PlainMatrices
from headrace.kernels.moe.triton import choose_experts_triton

_FP8_GROUP = 128


@dataclass(frozen=True)
class MixtureSizes:
    """A layer's experts, and how many tokens a step has."""

    num_experts: int
    num_chosen: int
    hidden: int
    inner: int
    num_tokens: tuple[int, ...]


# As published for Qwen3-30B-A3B.
GPU = MixtureSizes(128, 8, 2048, 768, (1, 64, 256, 8192))
DRY = MixtureSizes(4, 2, 128, 96, (3,))


class MixtureCase:
    """Random experts, as they are and in FP8, for tokens that like all of them alike."""

    def __init__(self, sizes: Sizes, mixture: MixtureSizes, num_tokens: int) -> None:
        self.mixture, device = mixture, sizes.device
        experts, hidden, inner = mixture.num_experts, mixture.hidden, mixture.inner
        self.x = torch.randn(num_tokens, hidden, device=device).to(sizes.dtype)
        logits = torch.randn(num_tokens, experts, device=device)
        self.logits = logits.to(sizes.dtype)
        self.ids, self.shares = choose_experts_triton(self.logits, mixture.num_chosen, normalise=True)
        gate_up = (torch.randn(experts, 2 * inner, hidden, device=device) * hidden**-0.5).to(sizes.dtype)
        down = (torch.randn(experts, hidden, inner, device=device) * inner**-0.5).to(sizes.dtype)
        self.gate_up, self.down = gate_up, down
        self.plain = StackedExperts(PlainMatrices(gate_up), PlainMatrices(down), Gate.SILU)
        self.fp8 = StackedExperts(_in_fp8(gate_up), _in_fp8(down), Gate.SILU)
        order = self.ids.flatten().argsort(stable=True)
        self._sorted_rows = self.x[order // mixture.num_chosen]
        counts = self.ids.flatten().bincount(minlength=experts)
        self._ends = counts.cumsum(0).to(torch.int32)
        self.num_used = int(counts.count_nonzero())

    def mix(self, experts: StackedExperts) -> Tensor:
        """All of it but the router's product."""
        ids, shares = choose_experts_triton(self.logits, self.mixture.num_chosen, normalise=True)
        return mix_stacked_experts(self.x, experts, ids, shares)

    def loop(self) -> Tensor:
        """The experts called one by one, once the host knows who has which token."""
        return mix_experts(self.x, self.apart(), self.ids, self.shares)

    def apart(self) -> list[partial[Tensor]]:
        return [partial(_expert, *each) for each in zip(self.gate_up, self.down, strict=True)]

    def apart_in_fp8(self) -> list[partial[Tensor]]:
        """With the kernel of projections, which is checked by itself."""
        weights = zip(_weights(self.fp8.gate_up), _weights(self.fp8.down), strict=True)
        return [partial(_expert_in_fp8, *each) for each in weights]

    def grouped_in_torch(self) -> Tensor:
        """The two products alone, of rows that are sorted already."""
        rows = torch._grouped_mm(self._sorted_rows, self.gate_up.transpose(1, 2), offs=self._ends)
        product: Tensor = torch._grouped_mm(silu_and_mul(rows), self.down.transpose(1, 2), offs=self._ends)
        return product

    def floor(self, limits: Limits, number_bytes: int, rate: int) -> float:
        """Seconds that the used experts' bytes take, or all products, which are `rate` times as fast as bfloat16's."""
        weights = 3 * self.mixture.hidden * self.mixture.inner
        num_bytes = self.num_used * weights * number_bytes + 2 * self.x.numel() * self.x.element_size()
        flops = 2 * self.ids.numel() * weights
        seconds: float = max(num_bytes / limits.bytes_per_second, flops / (rate * limits.flops_per_second))
        return seconds


def _in_fp8(matrices: Tensor) -> Matrices:
    quantized = [quantize_rows_reference(each, torch.float8_e4m3fn, _FP8_GROUP) for each in matrices]
    values, scales = (torch.stack(each) for each in zip(*quantized, strict=True))
    return ByteMatrices(values, scales.transpose(1, 2).contiguous(), _FP8_GROUP)


def _weights(matrices: Matrices) -> list[ScaledWeight]:
    assert isinstance(matrices, ByteMatrices)
    return [
        ScaledWeight(values, scales, matrices.group_size)
        for values, scales in zip(matrices.values, matrices.scales, strict=True)
    ]


def _expert_in_fp8(gate_up: ScaledWeight, down: ScaledWeight, x: Tensor) -> Tensor:
    for weight, activate in ((gate_up, silu_and_mul), (down, None)):
        values, scales = quantize_rows_triton(x, weight.values.dtype, weight.group_size)
        product = scaled_linear_triton(values, scales, weight, None, x.dtype)
        x = product if activate is None else activate(product)
    return x


def _expert(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return linear(silu_and_mul(linear(x, gate_up)), down)


def check_mixtures(sizes: Sizes, mixture: MixtureSizes) -> None:
    """Against one token and one expert at a time, and in larger steps, against one expert. Raises `AssertionError`."""
    ways = {5: mix_experts_reference} | dict.fromkeys(mixture.num_tokens, mix_experts)
    for num_tokens, mix in ways.items():
        case = MixtureCase(sizes, mixture, num_tokens)
        for experts, apart in ((case.plain, case.apart()), (case.fp8, case.apart_in_fp8())):
            assert_near(case.mix(experts), mix(case.x, apart, case.ids, case.shares), tolerance_of(sizes))


def mixture_lines(sizes: Sizes, mixture: MixtureSizes, limits: Limits) -> Iterator[Line]:
    """Routing, products and mixing of one layer, as a decode and a prefill have them."""
    for num_tokens in mixture.num_tokens:
        case = MixtureCase(sizes, mixture, num_tokens)
        taken = timed(partial(case.mix, case.plain), sizes)
        title = f"mixture of {mixture.num_experts} experts, {num_tokens} tokens: fraction of its limit"
        floor = case.floor(limits, sizes.dtype.itemsize, 1)
        yield Line(title, taken.median * 1e6, "us", floor / taken.median, spread=taken.spread)
        of_loop = timing_with_waits(case.loop, sizes.device, sizes.rounds)
        yield Line(
            "  times as fast as experts called one by one", of_loop.median * 1e6, "us", of_loop.median / taken.median
        )
        in_fp8 = timed(partial(case.mix, case.fp8), sizes)
        floor = case.floor(limits, 1, 2)
        yield Line(
            "  in FP8: fraction of its limit", in_fp8.median * 1e6, "us", floor / in_fp8.median, spread=in_fp8.spread
        )
        yield Line("  in FP8: times as fast", in_fp8.median * 1e6, "us", taken.median / in_fp8.median)
        yield from _torch_lines(sizes, case, taken.median)


def _torch_lines(sizes: Sizes, case: MixtureCase, own_seconds: float) -> Iterator[Line]:
    try:
        taken = timed(case.grouped_in_torch, sizes)
    # It is torch's own business what it takes, and where.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"without torch's grouped products: {' '.join(str(error).split())[:200]}", flush=True)
        return
    title = "  times as fast as torch's grouped products alone, without routing and mixing"
    yield Line(title, taken.median * 1e6, "us", taken.median / own_seconds)
