"""The GPU kernels' figures for `gpu.py`: each against what the device can do, or against torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from headrace.kernels.activation.triton import silu_and_mul_triton
from headrace.kernels.linear import Int4Weight, ScaledWeight
from headrace.kernels.linear.quantized_reference import (
    int4_linear_reference,
    quantize_rows_reference,
    scaled_linear_reference,
)
from headrace.kernels.linear.triton import int4_linear_triton, quantize_rows_triton, scaled_linear_triton
from headrace.kernels.norm_rotary.triton import add_rms_norm_triton
from headrace.kernels.paged_attention import AttentionMetadata, paged_attention_reference
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.prefix_groups import Gate
from headrace.kernels.paged_attention.static_plans import StaticPlans
from headrace.kernels.paged_attention.triton import attend_planned
from headrace.kernels.sampling.triton import likeliest_tokens_triton, sample_tokens_triton

BLOCK_SIZE = 16
# A few times what a GPU's level-2 cache holds.
_FLUSHED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Sizes:
    """How large everything is: as published for Llama-3-8B on a GPU, or just enough to run on a CPU.

    prefixes: how many tokens are shared, each with how many times as fast as plain attention that is to be.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefixes: dict[int, float]
    own_tokens: int
    decode_batch: int
    decode_context: int
    prefill_tokens: int
    groups: int
    hidden: int
    inner: int
    linear_rows: tuple[int, ...]
    vocab: int
    copy_bytes: int
    matrix: int
    rounds: int

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


GPU = Sizes(
    torch.device("cuda"), torch.bfloat16, 32, 8, 128, batch=256, prefixes={2048: 4.0, 8192: 8.0}, own_tokens=128,
    decode_batch=32, decode_context=4096, prefill_tokens=8192, groups=8, hidden=4096, vocab=128256,
    inner=14336, linear_rows=(1, 64, 4096),
    copy_bytes=4 * 2**30, matrix=8192, rounds=20,
)  # fmt: skip
DRY = Sizes(
    torch.device("cpu"), torch.float32, 4, 2, 64, batch=4, prefixes={64: 4.0}, own_tokens=8,
    decode_batch=2, decode_context=100, prefill_tokens=40, groups=2, hidden=64, vocab=500,
    inner=256, linear_rows=(3,),
    copy_bytes=2**20, matrix=64, rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the device was measured to do: bytes copied (read and written) and products, per second."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Line:
    """A row of the table: a figure, its unit, its fraction of a limit or ratio to a rival, and the goal for that.

    number: which of the project's goals it is about. limit: what the figure could be at best, in its unit.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    goal: float | None = None
    number: int | None = None
    limit: float | None = None


def seconds(call: Callable[[], object], sizes: Sizes) -> float:
    """Median time of a call.

    On a GPU it is made once to warm up and then replayed from a CUDA graph, and the GPU's cache holds none of what it
    reads, as in a model: there the other layers were between.
    """
    if sizes.device.type != "cuda":
        return _host_seconds(call, sizes.rounds)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    new_event: Callable[..., Any] = torch.cuda.Event
    others = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=sizes.device)
    for _ in range(sizes.rounds):
        others.zero_()
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return median(times)


def _host_seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def measure_limits(sizes: Sizes) -> Limits:
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    destination = torch.empty_like(source)
    copy = seconds(lambda: destination.copy_(source), sizes)
    a, b = torch.randn(2, sizes.matrix, sizes.matrix, device=sizes.device).to(sizes.dtype)
    product = seconds(lambda: a @ b, sizes)
    return Limits(2 * sizes.copy_bytes / copy, 2 * sizes.matrix**3 / product)


@dataclass(frozen=True)
class AttentionCase:
    """One layer's queries and cache, and where each sequence's blocks are."""

    query: Tensor
    caches: Tensor
    metadata: AttentionMetadata

    @classmethod
    def build(cls, sizes: Sizes, query_lens: list[int], contexts: list[int], prefixes: list[range]) -> "AttentionCase":
        """`prefixes[i]`: the blocks that sequence i begins with; its own follow."""
        fresh = max((blocks.stop for blocks in prefixes), default=0)
        tables = []
        for context, prefix in zip(contexts, prefixes, strict=True):
            own = -(-context // BLOCK_SIZE) - len(prefix)
            tables.append([*prefix, *range(fresh, fresh + own)])
            fresh += own
        metadata = AttentionMetadata(query_lens, contexts, tables, BLOCK_SIZE, sizes.device)
        generator = torch.Generator(sizes.device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=sizes.device, dtype=sizes.dtype)

        query = randn(sum(query_lens), sizes.heads, sizes.head_dim)
        return cls(query, randn(2, fresh, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim), metadata)

    @classmethod
    def decode(cls, sizes: Sizes, prefix: int, groups: int = 1) -> "AttentionCase":
        """`sizes.batch` sequences with one new token each, in groups that share a prefix of their own."""
        per_group = prefix // BLOCK_SIZE
        prefixes = [range(index % groups * per_group, (index % groups + 1) * per_group) for index in range(sizes.batch)]
        return cls.build(sizes, [1] * sizes.batch, [prefix + sizes.own_tokens] * sizes.batch, prefixes)

    def in_fp8(self) -> "AttentionCase":
        """The same with its keys and values in 8 bits."""
        return AttentionCase(self.query, self.caches.to(torch.float8_e4m3fn), self.metadata)

    def runner(self, sizes: Sizes, gate: Gate) -> tuple[Callable[[], object], Tensor]:
        """A call that attends, and the tensor it fills."""
        plan = plan_attention(self.metadata, sizes.attention, None, gate)
        return self._calling(sizes, DevicePlan.holding(plan, sizes.heads, sizes.head_dim, sizes.device))

    def engine_runner(self, sizes: Sizes) -> tuple[Callable[[], object], Tensor]:
        """As `runner`, with what the engine's CUDA graphs read: a plan of what its own gate says, in memory that has
        room for any step's.
        """
        key, num_tokens = (sizes.attention, None), len(self.query)
        longest = max(len(table) for table in self.metadata.block_tables)
        plans = StaticPlans([key], num_tokens, longest, BLOCK_SIZE, sizes.device)
        launches = plans.load(self.metadata)
        return self._calling(sizes, plans.metadata(num_tokens, launches).device_plans[key])

    def _calling(self, sizes: Sizes, held: DevicePlan) -> tuple[Callable[[], object], Tensor]:
        output = torch.full_like(self.query, torch.nan)
        scale = sizes.head_dim**-0.5
        keys, values = self.caches
        return lambda: attend_planned(self.query, keys, values, held, scale, output), output


def always(num_sequences: int, num_tokens: int) -> bool:
    return True


def never(num_sequences: int, num_tokens: int) -> bool:
    return False


def check_attention(sizes: Sizes) -> None:
    """A mixed batch, shared and not, against the reference. Raises `AssertionError`."""
    prefix = range(4)
    case = AttentionCase.build(
        sizes, [1, 1, 9, 40, 1], [70, 65, 90, 40, sizes.decode_context], [prefix, prefix, prefix, range(0), range(0)]
    )
    tolerance = 2e-2 if sizes.dtype == torch.bfloat16 else 2e-5
    for held in (case, case.in_fp8()):
        keys, values = held.caches
        expected = paged_attention_reference(held.query, keys, values, held.metadata, sizes.head_dim**-0.5)
        for run, output in (held.runner(sizes, never), held.runner(sizes, always), held.engine_runner(sizes)):
            run()
            torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def attention_lines(sizes: Sizes, limits: Limits) -> list[Line]:
    lines = []
    for prefix, goal in sizes.prefixes.items():
        case = AttentionCase.decode(sizes, prefix)
        plain, shared = (seconds(case.runner(sizes, gate)[0], sizes) for gate in (never, always))
        floor = _decode_floor(sizes, limits, prefix, groups=1)
        lines += [
            Line(f"decode, {sizes.batch} rows, {prefix} shared: plain paged", plain * 1e3, "ms"),
            Line("  shared: times as fast as plain", shared * 1e3, "ms", plain / shared, goal, 1),
            Line("  shared: fraction of the roofline", shared * 1e3, "ms", floor / shared, 0.75, 1, floor * 1e3),
        ]
        of_engine = seconds(case.engine_runner(sizes)[0], sizes)
        grouped = seconds(AttentionCase.decode(sizes, prefix, sizes.groups).engine_runner(sizes)[0], sizes)
        least = _decode_floor(sizes, limits, prefix, sizes.groups) * 1e3
        lines += [
            Line("  as the engine's graphs run it: of that speed", of_engine * 1e3, "ms", shared / of_engine),
            Line(
                f"  {sizes.groups} groups, so too: speed of one's",
                grouped * 1e3,
                "ms",
                of_engine / grouped,
                0.85,
                2,
                least,
            ),
        ]
    return [*lines, *_plain_decode_lines(sizes, limits), *_prefill_lines(sizes, limits)]


def _decode_floor(sizes: Sizes, limits: Limits, prefix: int, groups: int) -> float:
    num_bytes = sizes.kv_bytes * (groups * prefix + sizes.batch * sizes.own_tokens)
    flops = 4 * sizes.heads * sizes.head_dim * sizes.batch * (prefix + sizes.own_tokens)
    return max(num_bytes / limits.bytes_per_second, flops / limits.flops_per_second)


def _plain_decode_lines(sizes: Sizes, limits: Limits) -> list[Line]:
    rows, context = sizes.decode_batch, sizes.decode_context
    case = AttentionCase.build(sizes, [1] * rows, [context] * rows, [range(0)] * rows)
    time_in_fp8 = seconds(case.in_fp8().runner(sizes, never)[0], sizes)
    rate_in_fp8 = sizes.kv_bytes / sizes.dtype.itemsize * rows * context / time_in_fp8
    rate = sizes.kv_bytes * rows * context / seconds(case.runner(sizes, never)[0], sizes)
    name = f"decode, {rows} rows of {context}: fraction of copy bandwidth"
    limit = limits.bytes_per_second
    return [
        Line(name, rate / 1e9, "GB/s", rate / limit, 0.9, 3, limit / 1e9),
        Line("  the same from an FP8 cache", rate_in_fp8 / 1e9, "GB/s", rate_in_fp8 / limit, limit=limit / 1e9),
    ]


def _prefill_lines(sizes: Sizes, limits: Limits) -> list[Line]:
    tokens = sizes.prefill_tokens
    case = AttentionCase.build(sizes, [tokens], [tokens], [range(0)])
    ours = seconds(case.runner(sizes, never)[0], sizes)
    flops = 2 * sizes.heads * sizes.head_dim * tokens**2
    best = min(_sdpa_seconds(sizes, tokens))
    return [
        Line(
            f"prefill of {tokens}: speed of the best torch SDPA",
            flops / ours / 1e12,
            "TFLOP/s",
            best / ours,
            0.85,
            3,
            flops / best / 1e12,
        ),
        Line("  fraction of the matrix rate", flops / ours / 1e12, "TFLOP/s", flops / ours / limits.flops_per_second),
    ]


def _sdpa_seconds(sizes: Sizes, tokens: int) -> list[float]:
    shape = (1, sizes.heads, tokens, sizes.head_dim)
    query, key, value = (torch.randn(shape, device=sizes.device, dtype=sizes.dtype) for _ in range(3))
    backends = [SDPBackend.MATH]
    if sizes.device.type == "cuda":
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    times = []
    for backend in backends:
        with sdpa_kernel(backend):
            times.append(seconds(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), sizes))
    return times


@dataclass(frozen=True)
class QuantizedCase:
    """A layer's down projection in fewer bits: what is called for rows x, the weight's bytes, products per second.

    `rate`: how many times as many products a second the tensor cores make of these numbers as of bfloat16's.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    expected: Callable[[Tensor], Tensor]
    num_bytes: int
    rate: int


def quantized_cases(sizes: Sizes) -> list[QuantizedCase]:
    """Random weights of the projection from `inner` to `hidden`, in groups of 128 or with one scale an output."""
    outputs, inputs, device = sizes.hidden, sizes.inner, sizes.device
    nibbles = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = torch.full((inputs // 128, outputs), inputs**-0.5 / 6, dtype=torch.float16, device=device)
    int4 = Int4Weight.pack(nibbles, scales, torch.full_like(scales, 8, dtype=torch.uint8), 128)
    cases = [
        QuantizedCase(
            "W4A16",
            lambda x: int4_linear_triton(x, int4),
            lambda x: int4_linear_reference(x, int4),
            nibbles.numel() // 2,
            1,
        )
    ]
    plain = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    byte_dtypes = {"W8A8 int8": torch.int8, "W8A8 fp8": torch.float8_e4m3fn}
    for name, byte_dtype in byte_dtypes.items():
        for group_size in (inputs, 128):
            values, row_scales = quantize_rows_reference(plain, byte_dtype, group_size)
            weight = ScaledWeight(values, row_scales.t().contiguous(), group_size)
            title = name if group_size == inputs else f"{name} in groups"
            cases.append(QuantizedCase(title, _scaled(weight), _scaled_reference(weight), values.numel(), 2))
    return cases


def _scaled(weight: ScaledWeight) -> Callable[[Tensor], Tensor]:
    """Rows quantised, and multiplied."""

    def call(x: Tensor) -> Tensor:
        values, scales = quantize_rows_triton(x, weight.values.dtype, weight.group_size)
        return scaled_linear_triton(values, scales, weight, None, x.dtype)

    return call


def _scaled_reference(weight: ScaledWeight) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        values, scales = quantize_rows_reference(x, weight.values.dtype, weight.group_size)
        return scaled_linear_reference(values, scales, weight, None, x.dtype)

    return call


def check_linear(sizes: Sizes, cases: list[QuantizedCase]) -> None:
    """Every kind against its reference. Raises `AssertionError`."""
    # What fp8 has: the interpreter rounds other numbers to it wrongly.
    x = torch.sign(torch.randn(17, sizes.inner, device=sizes.device)).to(sizes.dtype)
    tolerance = 2e-2 if sizes.dtype == torch.bfloat16 else 2e-5
    for case in cases:
        torch.testing.assert_close(case.call(x), case.expected(x), rtol=tolerance, atol=tolerance)


def linear_lines(sizes: Sizes, limits: Limits) -> list[Line]:
    """Products with quantised weights, against the time that their bytes or their products take at least."""
    cases = quantized_cases(sizes)
    check_linear(sizes, cases)
    plain = torch.randn(sizes.hidden, sizes.inner, device=sizes.device).to(sizes.dtype)
    lines = []
    for rows in sizes.linear_rows:
        x = torch.randn(rows, sizes.inner, device=sizes.device).to(sizes.dtype)
        torch_time = seconds(lambda x=x: linear(x, plain), sizes)  # type: ignore[misc]
        lines.append(Line(f"down projection of {rows} rows: torch", torch_time * 1e3, "ms"))
        for case in cases:
            time_taken = seconds(lambda x=x, case=case: case.call(x), sizes)  # type: ignore[misc]
            floor = _linear_floor(sizes, limits, case, rows)
            lines += [
                Line(f"  {case.name}: fraction of its limit", time_taken * 1e3, "ms", floor / time_taken),
                Line(f"  {case.name}: times as fast as torch", time_taken * 1e3, "ms", torch_time / time_taken),
            ]
    return lines


def _linear_floor(sizes: Sizes, limits: Limits, case: QuantizedCase, rows: int) -> float:
    num_bytes = case.num_bytes + rows * (sizes.hidden + sizes.inner) * sizes.dtype.itemsize
    flops = 2 * rows * sizes.hidden * sizes.inner
    return max(num_bytes / limits.bytes_per_second, flops / (case.rate * limits.flops_per_second))


def small_lines(sizes: Sizes, limits: Limits) -> list[Line]:
    """Kernels that read and write, against copying; and sampling."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)

    rows = 16 * sizes.batch
    x, residual, weight = randn(rows, sizes.hidden), randn(rows, sizes.hidden), randn(sizes.hidden)
    gate_up = randn(rows, 8 * sizes.hidden)
    logits = randn(sizes.batch, sizes.vocab)
    ones = torch.ones(sizes.batch, dtype=torch.float64, device=sizes.device)
    zeros, halves, most = torch.zeros_like(ones), ones / 2, ones * 0.9
    every = torch.zeros(sizes.batch, dtype=torch.int64, device=sizes.device)
    fifty = torch.full_like(every, 50)
    size = sizes.dtype.itemsize

    def rate(name: str, num_bytes: int, call: Callable[[], object]) -> Line:
        measured = num_bytes / seconds(call, sizes)
        return Line(f"{name}: fraction of copy bandwidth", measured / 1e9, "GB/s", measured / limits.bytes_per_second)

    def sampling(name: str, call: Callable[[], object]) -> Line:
        return Line(f"sampling, {sizes.batch} rows, {name}", seconds(call, sizes) * 1e3, "ms")

    return [
        rate("RMSNorm and residual", 4 * x.numel() * size, lambda: add_rms_norm_triton(x, residual, weight, 1e-5)),
        rate("silu(gate) * up", gate_up.numel() * size * 3 // 2, lambda: silu_and_mul_triton(gate_up)),
        sampling("greedy", lambda: likeliest_tokens_triton(logits, False)),
        sampling("no filter", lambda: sample_tokens_triton(logits, ones, every, ones, zeros, halves)),
        sampling("top-k 50", lambda: sample_tokens_triton(logits, ones, fifty, ones, zeros, halves)),
        sampling("top-p 0.9", lambda: sample_tokens_triton(logits, ones, every, most, zeros, halves)),
    ]
