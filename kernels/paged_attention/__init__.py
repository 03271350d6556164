"""Attention of new tokens over their sequences' keys and values in the paged KV cache.

- Of all paths: `metadata`, which has what each makes of a step's `batch_layout`; `decode_step`, by which those of a
  step go on with the ones of the step before; `latent_values`, where values lie inside keys.
- On a GPU `triton` launches `triton_kernels`, compiled for an `attention_shape` in its `kernel_shapes`, by a `plan`.
  `planning` makes it, with what `prefix_levels` finds that sequences share; `device_plan` has it in device memory,
  `static_plans` for captured steps, where a `followed_plan` goes on by a token.
- On a CPU `native` calls the compiled kernel with a `native_layout`; where that does not run, `cpu` takes torch's
  products over rectangles, each a `padded_group` of sequences, of which `prefix_groups` says which share a prefix for
  `shared_prefix`; `sinks` is its softmax.
- On both `two_way` computes tokens that see each other in both directions once more.
- `reference` is what all are compared with, and reads caches in FP8 where there is no GPU.
"""

import torch
from torch import Tensor

from ..device import runs_triton
from ..kv_cache.fp8 import UNSCALED, KVScales, is_fp8
from .attention_shape import AttentionShape, PlanKey
from .cpu import paged_attention_padded
from .decode_step import DecodeSeries, DecodeStep
from .device_plan import LAUNCHES, PlanTooLargeError
from .metadata import AttentionMetadata
from .native import paged_attention_native, takes_native
from .reference import paged_attention_reference
from .static_plans import StaticPlans, plan_bytes
from .two_way import Span, attend_both_ways


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales = UNSCALED,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention for prefill chunks and decodes in one batch: causal, but for the `spans` of the metadata.

    query: [num_tokens, num_heads, head_dim], the sequences one after the other as `metadata` says, each sequence's
    queries being its last tokens. key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], the
    new tokens' entries already written; values may be shorter, as the first part of each key is where latents are
    attended to. num_heads is a multiple of num_kv_heads. `sliding_window`: a token
    attends to itself and the `sliding_window - 1` tokens before it. `soft_cap`: a score x, scaled, counts as
    soft_cap · tanh(x / soft_cap). `kv_scales`: of caches in FP8, which the kernels read for any dtype of queries.
    sinks: [num_heads] float32, a score that each head has beside those of its keys and that no value belongs to: it
    takes a share of the softmax, as in gpt-oss, and is neither scaled nor capped.
    Returns query's shape, but with the values' size of heads, and its dtype; changes nothing.
    Raises `ValueError` naming the argument that does not fit.
    """
    output = _causal(query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, kv_scales, sinks)
    if metadata.spans:
        caches, spans = (key_cache, value_cache), metadata.spans
        attend_both_ways(output, query, *caches, spans, scale, sliding_window, soft_cap, kv_scales, sinks)
    return output


def _causal(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: KVScales,
    sinks: Tensor | None,
) -> Tensor:
    if runs_triton(query):
        from .triton import paged_attention_triton

        # It asks more of its arguments than others, and checks them itself.
        return paged_attention_triton(
            query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, kv_scales, sinks
        )
    _check(query, key_cache, value_cache, metadata)
    if sinks is not None:
        _check_sinks(sinks, query)
    if is_fp8(key_cache):
        return paged_attention_reference(
            query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, kv_scales, sinks
        )
    if takes_native(query, key_cache, value_cache, scale):
        return paged_attention_native(query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, sinks)
    return paged_attention_padded(query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, sinks)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata) -> None:
    if query.ndim != 3 or query.shape[0] != metadata.num_tokens:
        raise ValueError(f"query {tuple(query.shape)} must be [{metadata.num_tokens} tokens, num_heads, head_dim]")
    if key_cache.ndim != 4 or value_cache.ndim != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must be equal, but for the "
            "last dimension, and [num_blocks, block_size, num_kv_heads, head_dim]"
        )
    if key_cache.shape[1] != metadata.block_size:
        raise ValueError(f"key_cache has blocks of {key_cache.shape[1]} tokens, metadata of {metadata.block_size}")
    if query.shape[2] != key_cache.shape[3] or query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} must have head size {key_cache.shape[3]} and a multiple of "
            f"{key_cache.shape[2]} heads"
        )


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks {tuple(sinks.shape)} must be [{query.shape[1]} heads], as query has")
    if sinks.dtype != torch.float32:
        raise ValueError(f"sinks is {sinks.dtype}, and must be torch.float32")
    if sinks.device != query.device:
        raise ValueError(f"sinks is on {sinks.device}, and must be on {query.device}, as query is")
    if not sinks.is_contiguous():
        raise ValueError(f"sinks has stride {sinks.stride()}, and must be contiguous")


__all__ = [
    "LAUNCHES",
    "AttentionMetadata",
    "AttentionShape",
    "DecodeSeries",
    "DecodeStep",
    "PlanKey",
    "PlanTooLargeError",
    "Span",
    "StaticPlans",
    "paged_attention",
    "paged_attention_reference",
    "plan_bytes",
]
