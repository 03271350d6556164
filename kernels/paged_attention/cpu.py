"""Attention on padded rectangles with torch's own products: on a CPU, where the compiled kernel does not run."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .metadata import AttentionMetadata
from .padded_group import PaddedGroup
from .shared_prefix import attend_shared_prefix
from .sinks import softmax_with_sinks

# Of a rectangle of queries and keys, so many at a time: 64 MiB of float32.
_MAX_SCORES = 2**24


def paged_attention_padded(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `paged_attention`; sequences of similar lengths are computed together, shared prefixes once where it pays."""
    output = query.new_empty(*query.shape[:2], value_cache.shape[3])
    # Under a window sequences of different lengths see different parts of a prefix.
    groups = metadata.shared_groups if sliding_window is None else metadata.padded_groups
    for group in groups:
        if group.prefix_blocks is not None:
            attended = attend_shared_prefix(
                query, key_cache, value_cache, group, group.prefix_blocks, scale, soft_cap, sinks
            )
        else:
            attended = _attend(query, key_cache, value_cache, group, scale, sliding_window, soft_cap, sinks)
        output[group.tokens] = attended[group.is_query]
    return output


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: PaddedGroup,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, max_query, num_heads, value_dim] of one group; what stands at padded queries means nothing."""
    queries = query[group.token_index].transpose(1, 2)
    keys, values = (each.transpose(1, 2) for each in group.gathered(key_cache, value_cache))
    mask = group.mask(keys.shape[2], sliding_window)
    # It would copy the keys for each head where values are not as long as they are.
    if soft_cap is not None or sinks is not None or values.shape[3] != keys.shape[3]:
        num_queries = max(1, _MAX_SCORES // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
        parts = (slice(start, start + num_queries) for start in range(0, queries.shape[2], num_queries))
        outputs = [
            _attend_otherwise(queries[:, :, part], keys, values, mask[:, :, part], scale, soft_cap, sinks)
            for part in parts
        ]
        return torch.cat(outputs, 2).transpose(1, 2)
    attended = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key_cache.shape[2],
    )
    return attended.transpose(1, 2)


def _attend_otherwise(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, num_heads, max_query, value_dim]: what torch's own attention cannot do."""
    num_sequences, num_heads, max_query, head_dim = queries.shape
    # The heads of a KV head one after the other: its keys and values are not copied for each.
    rows = (queries * (scale / (soft_cap or 1.0))).reshape(num_sequences, keys.shape[1], -1, head_dim)
    scores = (rows @ keys.transpose(-1, -2)).view(num_sequences, num_heads, max_query, -1)
    if soft_cap is not None:
        scores.tanh_().mul_(soft_cap)
    scores.masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(-1) if sinks is None else softmax_with_sinks(scores, sinks.view(-1, 1, 1))
    return (weights.reshape(*rows.shape[:3], -1) @ values).view(*queries.shape[:3], -1)
