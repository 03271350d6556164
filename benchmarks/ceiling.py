"""What the matrix products alone of a workload take here: no engine that computes them all can be faster."""

import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES
from torch import Tensor
from workloads import Workload

# Weights are read from memory in a model; a few copies in turn keep them out of the caches here too.
COPIES = 8
REPEATS = 3
# Fewer are slower, more hardly faster.
PREFILL_TOKENS = 2048

Product = Callable[[Tensor], Tensor]


def gemm_seconds(model: str, precision: str, workload: Workload) -> float:
    """Seconds for the workload's projections and its head, in prefills of 2,048 tokens and whole-batch decodes.

    Each shape is timed in every way torch has, with weights packed ahead by oneDNN or as they are; the fastest counts.
    For int8 both factors are 8 bits, and rounding the activations to them takes no time.
    """
    config: dict[str, Any] = SHAPES[model].config
    steps: int = max(workload.max_tokens) - 1
    batch = max(1, round((workload.output_tokens - workload.rows) / steps))
    prefill: int = workload.distinct_prompt_tokens()
    chunk = min(PREFILL_TOKENS, prefill)
    layers: int = config["num_hidden_layers"]
    total = 0.0
    for shape in _layer_shapes(model):
        total += layers * prefill / chunk * _seconds(precision, shape, chunk, COPIES)
        total += layers * steps * _seconds(precision, shape, batch, COPIES)
    num_heads: float = workload.output_tokens / batch
    return total + num_heads * _seconds(precision, (config["vocab_size"], config["hidden_size"]), batch, 1)


def _layer_shapes(model: str) -> list[tuple[int, int]]:
    """Output and input sizes, with what reads the same input as one."""
    config = SHAPES[model].config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [(hidden + 2 * kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


@torch.inference_mode()
def _seconds(precision: str, shape: tuple[int, int], tokens: int, copies: int) -> float:
    """One product of `tokens` rows by one of the `copies` of weights."""
    if precision == "int8":
        # Unsigned: signed ones take oneDNN's reference code, a thousand times slower, on a processor without AMX.
        x = torch.randint(0, 255, (tokens, shape[1]), dtype=torch.uint8)
        weights = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(copies)]
        return _time([_quantized(weight, tokens) for weight in weights], x)
    dtype: torch.dtype = getattr(torch, precision)
    x = torch.randn(tokens, shape[1]).to(dtype)
    weights = [torch.randn(shape).to(dtype) for _ in range(copies)]
    plain = _time([_plain(weight) for weight in weights], x)
    # Without AVX-512 oneDNN lays out no bfloat16.
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return plain
    return min(plain, _time([_packed(weight, tokens) for weight in weights], x))


def _plain(weight: Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _packed(weight: Tensor, tokens: int) -> Product:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def _quantized(weight: Tensor, tokens: int) -> Product:
    """8 bits times 8 bits with a scale for each output."""
    outputs, inputs = weight.shape
    packed = torch.ops.onednn.qlinear_prepack(weight, [tokens, inputs])
    scales, zero_points = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    # Where oneDNN lays out no bfloat16 it writes it by its reference code.
    output = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return lambda x: torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scales, zero_points, None, 1.0, 0, output, "none", [], ""
    )


def _time(products: list[Product], x: Tensor) -> float:
    least = float("inf")
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for product in products:
            product(x)
        least = min(least, time.perf_counter() - start)
    return least / len(products)
