"""Attention of many sequences over one prefix: the prefix's keys are read once, not once a sequence.

As Hydragen (arXiv 2402.05099) does: the queries of all sequences over the prefix are one dense product. The scores over
the prefix and over each sequence's own keys stand side by side under one softmax, so nothing has to be merged after it.
"""

import torch
from torch import Tensor

from .latent_values import gather
from .padded_group import PaddedGroup
from .sinks import softmax_with_sinks


def attend_shared_prefix(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: PaddedGroup,
    prefix_blocks: Tensor,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[n, max_query, num_heads, value_dim] of one group; what stands at padded queries means nothing.

    `group` describes the sequences' own blocks, after those of `prefix_blocks` [num_prefix_blocks], which all queries
    see whole. Other arguments as in `paged_attention`.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_sequences, max_query = group.token_index.shape
    shape = (num_sequences, max_query, num_kv_heads, -1, head_dim)
    by_head = (query[group.token_index] * scale).view(shape).permute(2, 0, 1, 3, 4)
    # One row a query head: [num_kv_heads, n * max_query * heads of a group, head_dim].
    rows = by_head.reshape(num_kv_heads, -1, head_dim).contiguous()
    own_rows = rows.view(num_kv_heads * num_sequences, -1, head_dim)

    prefix_keys, prefix_values = (each.flatten(0, 1) for each in gather(key_cache, value_cache, prefix_blocks))
    own_keys, own_values = map(_by_head, group.gathered(key_cache, value_cache))
    num_prefix, num_own = prefix_keys.shape[0], own_keys.shape[1]

    scores = rows.new_empty(num_kv_heads, rows.shape[1], num_prefix + num_own)
    torch.bmm(rows, prefix_keys.permute(1, 2, 0), out=scores[..., :num_prefix])
    own_scores = torch.bmm(own_rows, own_keys.transpose(1, 2))
    scores[..., num_prefix:] = own_scores.view(num_kv_heads, -1, num_own)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    visible = group.mask(num_own, None).unsqueeze(3)
    by_query = scores[..., num_prefix:].view(num_kv_heads, num_sequences, max_query, -1, num_own)
    by_query.masked_fill_(~visible.transpose(0, 1), float("-inf"))

    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # A row's head is one of its KV head's group.
        of_rows = sinks.view(num_kv_heads, 1, -1).expand(-1, num_sequences * max_query, -1)
        weights = softmax_with_sinks(scores, of_rows.reshape(num_kv_heads, -1, 1))
    attended = torch.bmm(weights[..., :num_prefix], prefix_values.transpose(0, 1))
    own_weights = weights[..., num_prefix:].reshape(own_rows.shape[0], -1, num_own)
    value_dim = attended.shape[2]
    attended.view(*own_rows.shape[:2], value_dim).baddbmm_(own_weights, own_values)
    of_tokens = attended.view(*by_head.shape[:4], value_dim).permute(1, 2, 0, 3, 4)
    return of_tokens.reshape(num_sequences, max_query, -1, value_dim)


def _by_head(gathered: Tensor) -> Tensor:
    """[num_kv_heads * n, num_keys, head_dim] of the sequences' own keys or values."""
    return gathered.permute(2, 0, 1, 3).reshape(-1, gathered.shape[1], gathered.shape[3])
