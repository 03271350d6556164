"""The figures of products with quantised weights for `gpu.py`: against their limits, and against torch's products."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from gpu_kernels import Limits, Sizes, assert_near, timed, tolerance_of
from gpu_table import Line
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.linear import Int4Weight, ScaledWeight
from headrace.kernels.linear.quantized import Int4Product
from headrace.kernels.linear.quantized_reference import (
    int4_linear_reference,
    quantize_rows_reference,
    scaled_linear_reference,
)
from headrace.kernels.linear.triton import (
    ScaledTile,
    int4_linear_triton,
    quantize_rows_triton,
    scaled_linear_triton,
)
from headrace.kernels.linear.unpacked import int4_linear_unpacked


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
        QuantizedCase(name, call, lambda x: int4_linear_reference(x, int4), nibbles.numel() // 2, 1)
        for name, call in (
            ("W4A16", Int4Product(int4, None)),
            ("W4A16, in one kernel", lambda x: int4_linear_triton(x, int4)),
            ("W4A16, unpacked first", lambda x: int4_linear_unpacked(x, int4)),
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


def check_linear(sizes: Sizes) -> None:
    """Every kind against its reference, in every tile that a number of rows may have. Raises `AssertionError`."""
    _check_cases(sizes, quantized_cases(sizes))


def check_fp8(sizes: Sizes) -> None:
    """As `check_linear`, of FP8 alone."""
    _check_cases(sizes, [case for case in quantized_cases(sizes) if "fp8" in case.name])


def _check_cases(sizes: Sizes, cases: list[QuantizedCase]) -> None:
    for rows in (17, *sizes.linear_rows):
        # What fp8 has: the interpreter rounds other numbers to it wrongly.
        x = torch.sign(torch.randn(rows, sizes.inner, device=sizes.device)).to(sizes.dtype)
        for case in cases:
            # Hopper adds up products of 8-bit floats in about 14 bits: a hundredth is lost of as many as there are.
            tolerance = 2 * tolerance_of(sizes) if "fp8" in case.name else tolerance_of(sizes)
            assert_near(case.call(x), case.expected(x), tolerance)


def linear_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    """Products with quantised weights, against the time that their bytes or their products take at least."""
    cases = quantized_cases(sizes)
    plain = torch.randn(sizes.hidden, sizes.inner, device=sizes.device).to(sizes.dtype)
    for rows in sizes.linear_rows:
        x = torch.randn(rows, sizes.inner, device=sizes.device).to(sizes.dtype)
        of_torch = timed(partial(linear, x, plain), sizes)
        name = f"down projection of {rows} rows: torch"
        yield Line(name, of_torch.median * 1e3, "ms", spread=of_torch.spread)
        for case in cases:
            taken = timed(partial(case.call, x), sizes)
            value, floor = taken.median * 1e3, _linear_floor(sizes, limits, case, rows)
            yield Line(f"  {case.name}: fraction of its limit", value, "ms", floor / taken.median, spread=taken.spread)
            yield Line(f"  {case.name}: times as fast as torch", value, "ms", of_torch.median / taken.median)
        if sizes.device.type == "cuda":
            yield from _scaled_mm_lines(sizes, x, plain, of_torch.median)


def _scaled_mm_lines(sizes: Sizes, x: Tensor, plain: Tensor, of_torch: float) -> Iterator[Line]:
    """torch's own product of rows in fp8, what is to be beaten; the rows are quantised by our kernel."""
    weight, weight_scales = quantize_rows_triton(plain, torch.float8_e4m3fn, sizes.inner)

    def call() -> Tensor:
        values, scales = quantize_rows_triton(x, torch.float8_e4m3fn, sizes.inner)
        return torch._scaled_mm(
            values, weight.t(), scales, weight_scales.t(), out_dtype=sizes.dtype, use_fast_accum=True
        )

    try:
        taken = timed(call, sizes)
    # It is torch's own business what it takes.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"without torch's scaled_mm: {' '.join(str(error).split())[:200]}", flush=True)
        return
    yield Line("  torch's scaled_mm fp8: times as fast as torch", taken.median * 1e3, "ms", of_torch / taken.median)


# Tiles of rows and outputs that fit into Hopper's registers, with warps and stages; some two to a processor.
_TILES = [
    ScaledTile(64, 64, 4, 2),
    ScaledTile(64, 128, 4, 1),
    ScaledTile(64, 128, 4, 2),
    ScaledTile(64, 128, 4, 1, max_stages=8),
    ScaledTile(64, 256, 8, 1),
    ScaledTile(128, 64, 4, 2),
    ScaledTile(128, 128, 4, 2, max_stages=3),
    ScaledTile(128, 128, 8, 1, max_stages=6),
    ScaledTile(128, 256, 8, 1),
    ScaledTile(256, 128, 8, 1),
]


def tile_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    """Of each projection of a layer in fp8: the time with the tile that is chosen, and with the best of all."""
    kv_size = 2 * sizes.kv_heads * sizes.head_dim
    hidden, inner = sizes.hidden, sizes.inner
    shapes = {
        "qkv": (hidden + kv_size, hidden),
        "output": (hidden, hidden),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    is_gpu = sizes.device.type == "cuda"
    choices = list(product(_TILES, (None, 1, 2, 4))) if is_gpu else [(_TILES[0], 1)]
    for rows, (name, shape) in product(sizes.linear_rows, shapes.items()):
        values, scales, weight = _fp8_factors(sizes, rows, *shape)
        num_bytes = weight.values.numel() + rows * (shape[1] + shape[0] * sizes.dtype.itemsize)
        flops = 2 * rows * shape[0] * shape[1]
        floor = max(num_bytes / limits.bytes_per_second, flops / (2 * limits.flops_per_second))
        call = partial(scaled_linear_triton, values, scales, weight, None, sizes.dtype)
        chosen = timed(call, sizes)
        title = f"{name} in fp8, {rows} rows: fraction of its limit"
        yield Line(title, chosen.median * 1e6, "us", floor / chosen.median, spread=chosen.spread)
        taken = {(tile, splits): timed(partial(call, splits, tile), sizes).median for tile, splits in choices}
        (tile, splits), best = min(taken.items(), key=lambda item: item[1])
        text = f"{tile.rows}×{tile.outputs}, {tile.num_warps} warps, {tile.per_processor} each, ≤{tile.max_stages}"
        yield Line(f"  best: {text} stages, {splits or 'own'} splits", best * 1e6, "us", floor / best)


def _fp8_factors(sizes: Sizes, rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, ScaledWeight]:
    x, plain = (torch.randn(size, inputs, device=sizes.device).to(sizes.dtype) for size in (rows, outputs))
    values, scales = quantize_rows_reference(plain, torch.float8_e4m3fn, inputs)
    return (
        *quantize_rows_triton(x, torch.float8_e4m3fn, inputs),
        ScaledWeight(values, scales.t().contiguous(), inputs),
    )


def _linear_floor(sizes: Sizes, limits: Limits, case: QuantizedCase, rows: int) -> float:
    num_bytes = case.num_bytes + rows * (sizes.hidden + sizes.inner) * sizes.dtype.itemsize
    flops = 2 * rows * sizes.hidden * sizes.inner
    floor: float = max(num_bytes / limits.bytes_per_second, flops / (case.rate * limits.flops_per_second))
    return floor
