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
PREFILL_TOKENS = 2048

Product = Callable[[Tensor], Tensor]


def gemm_seconds(model: str, dtype: torch.dtype, workload: Workload) -> float:
    """Seconds for the workload's projections and its head, in prefills of 2,048 tokens and whole-batch decodes.

    Each shape is timed both as `F.linear` and with weights packed ahead by oneDNN; the faster counts.
    """
    config: dict[str, Any] = SHAPES[model].config
    steps: int = max(workload.max_tokens) - 1
    batch = max(1, round((workload.output_tokens - workload.rows) / steps))
    prefill: int = workload.distinct_prompt_tokens()
    chunk = min(PREFILL_TOKENS, prefill)
    layers: int = config["num_hidden_layers"]
    total = 0.0
    for out_size, in_size in _layer_shapes(model):
        weights = [torch.randn(out_size, in_size).to(dtype) for _ in range(COPIES)]
        total += layers * prefill / chunk * _seconds(weights, chunk)
        total += layers * steps * _seconds(weights, batch)
    head = [torch.randn(config["vocab_size"], config["hidden_size"]).to(dtype)]
    num_heads: float = workload.output_tokens / batch
    return total + num_heads * _seconds(head, batch)


def _layer_shapes(model: str) -> list[tuple[int, int]]:
    config = SHAPES[model].config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [(hidden + 2 * kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


@torch.inference_mode()
def _seconds(weights: list[Tensor], tokens: int) -> float:
    """One product of `tokens` rows by one of the weights."""
    x = torch.randn(tokens, weights[0].shape[1]).to(weights[0].dtype)
    plain = [_plain(weight) for weight in weights]
    packed = [_packed(weight, tokens) for weight in weights]
    return min(_time(products, x) for products in (plain, packed))


def _plain(weight: Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _packed(weight: Tensor, tokens: int) -> Product:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def _time(products: list[Product], x: Tensor) -> float:
    least = float("inf")
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for product in products:
            product(x)
        least = min(least, time.perf_counter() - start)
    return least / len(products)
