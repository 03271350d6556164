"""The obvious torch that every other implementation is compared with."""

import torch
from torch import Tensor

from .metadata import AttentionMetadata


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """See `paged_attention`; one sequence and one head at a time, in float32."""
    output = torch.empty_like(query)
    group = query.shape[1] // key_cache.shape[2]
    for start, length, context, table in zip(
        metadata.query_starts, metadata.query_lens, metadata.context_lens, metadata.block_tables, strict=True
    ):
        keys = key_cache[list(table)].flatten(0, 1)[:context].float()
        values = value_cache[list(table)].flatten(0, 1)[:context].float()
        positions = torch.arange(context - length, context).unsqueeze(1)
        key_positions = torch.arange(context)
        visible = key_positions <= positions
        if sliding_window is not None:
            visible &= key_positions > positions - sliding_window
        for head in range(query.shape[1]):
            scores = query[start : start + length, head].float() @ keys[:, head // group].T * scale
            weights = scores.masked_fill(~visible.to(scores.device), float("-inf")).softmax(-1)
            output[start : start + length, head] = (weights @ values[:, head // group]).to(query.dtype)
    return output
