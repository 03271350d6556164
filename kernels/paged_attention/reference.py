"""The obvious torch that every other implementation is compared with."""

import torch
from torch import Tensor

from ..kv_cache.fp8 import UNSCALED, KVScales, gathered
from .metadata import AttentionMetadata


def paged_attention_reference(
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
    """See `paged_attention`; one sequence and one head at a time, in float32."""
    return paged_attention_with_lse(
        query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, kv_scales, sinks
    )[0]


def paged_attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: KVScales = UNSCALED,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and the natural log of the sum of the scores' exponentials: [num_tokens, num_heads] float32.

    With a `soft_cap`, scores become cap · tanh(score / cap), as Gemma 2 has it. A head's sink is one of its scores.
    """
    output = query.new_empty(*query.shape[:2], value_cache.shape[3])
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    group = query.shape[1] // key_cache.shape[2]
    for start, length, context, table in zip(
        metadata.query_starts, metadata.query_lens, metadata.context_lens, metadata.block_tables, strict=True
    ):
        keys = gathered(key_cache, list(table), kv_scales.key).flatten(0, 1)[:context]
        values = gathered(value_cache, list(table), kv_scales.value).flatten(0, 1)[:context]
        positions = torch.arange(context - length, context).unsqueeze(1)
        key_positions = torch.arange(context)
        # The last token that each one sees.
        last = positions.clone()
        for span in metadata.spans:
            if start <= span.start < start + length and not (span.in_windows and sliding_window is None):
                last[span.start - start : span.start - start + span.length] = span.end - 1
        visible = key_positions <= last
        if sliding_window is not None:
            visible &= key_positions > positions - sliding_window
        for head in range(query.shape[1]):
            scores = query[start : start + length, head].float() @ keys[:, head // group].T * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(length, 1)), dim=1)
            lse[start : start + length, head] = scores.logsumexp(-1)
            weights = scores.softmax(-1)[:, :context]
            output[start : start + length, head] = (weights @ values[:, head // group]).to(query.dtype)
    return output, lse
