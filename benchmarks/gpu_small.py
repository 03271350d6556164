"""The figures of kernels that only read and write, for `gpu.py`: against copying; and of sampling."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_kernels import BLOCK_SIZE, Limits, Sizes, timed
from gpu_table import Line
from torch import Tensor

from headrace.kernels.activation.triton import silu_and_mul_triton
from headrace.kernels.linear import RowFormat
from headrace.kernels.linear.triton import quantize_rows_triton
from headrace.kernels.norm_rotary.triton import (
    add_rms_norm_quantized_triton,
    add_rms_norm_triton,
    rotate_and_write_triton,
)
from headrace.kernels.sampling.triton import likeliest_tokens_triton, sample_tokens_triton


def small_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    """At the size of a decode, where a launch is most of it, and of a prefill."""
    for rows in sizes.small_rows:
        for name, num_bytes, call in _streaming(sizes, rows):
            taken = timed(call, sizes)
            rate = num_bytes / taken.median
            title = f"{name}, {rows} rows: fraction of copy bandwidth"
            yield Line(title, taken.median * 1e6, "us", rate / limits.bytes_per_second, spread=taken.spread)
    for name, num_bytes, call in _sampling(sizes):
        taken = timed(call, sizes)
        fraction = num_bytes / taken.median / limits.bytes_per_second
        title = f"sampling, {sizes.batch} rows, {name}: of reading the logits once"
        yield Line(title, taken.median * 1e6, "us", fraction, spread=taken.spread)


# A name, the bytes that it has to read and write, and a call.
_Case = tuple[str, int, Callable[[], object]]


def _streaming(sizes: Sizes, rows: int) -> Iterator[_Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)

    size = sizes.dtype.itemsize
    x, residual, weight = randn(rows, sizes.hidden), randn(rows, sizes.hidden), randn(sizes.hidden)
    yield "RMSNorm and residual", 4 * x.numel() * size, lambda: add_rms_norm_triton(x, residual, weight, 1e-5)
    in_fp8 = RowFormat(torch.float8_e4m3fn, sizes.hidden)
    yield (
        "RMSNorm and residual into fp8",
        x.numel() * (3 * size + 1),
        lambda: add_rms_norm_quantized_triton(x, residual, weight, 1e-5, in_fp8),
    )
    gate_up = randn(rows, 2 * sizes.inner)
    yield "silu(gate) * up", gate_up.numel() * size * 3 // 2, lambda: silu_and_mul_triton(gate_up)
    inner = randn(rows, sizes.inner)
    for group in (sizes.inner, 128):
        num_bytes = inner.numel() * (size + 1)
        yield (
            f"rows to fp8, groups of {group}",
            num_bytes,
            partial(quantize_rows_triton, inner, torch.float8_e4m3fn, group),
        )
    qkv = randn(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
    angles, slots = randn(rows, sizes.head_dim // 2), torch.arange(rows, device=sizes.device)
    caches = randn(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    yield (
        "rotary and KV write",
        2 * qkv.numel() * size,
        lambda: rotate_and_write_triton(qkv, angles, angles, caches[0], caches[1], slots),
    )


def _sampling(sizes: Sizes) -> Iterator[_Case]:
    logits = torch.randn(sizes.batch, sizes.vocab, device=sizes.device, dtype=sizes.dtype)
    ones = torch.ones(sizes.batch, dtype=torch.float64, device=sizes.device)
    zeros, halves, most = torch.zeros_like(ones), ones / 2, ones * 0.9
    every = torch.zeros(sizes.batch, dtype=torch.int64, device=sizes.device)
    fifty, num_bytes = torch.full_like(every, 50), logits.numel() * sizes.dtype.itemsize
    yield "greedy", num_bytes, lambda: likeliest_tokens_triton(logits, False)
    yield "no filter", num_bytes, lambda: sample_tokens_triton(logits, ones, every, ones, zeros, halves)
    yield "top-k 50", num_bytes, lambda: sample_tokens_triton(logits, ones, fifty, ones, zeros, halves)
    yield "top-p 0.9", num_bytes, lambda: sample_tokens_triton(logits, ones, every, most, zeros, halves)
