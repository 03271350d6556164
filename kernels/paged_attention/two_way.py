"""Attention of tokens that see each other in both directions, as an image's do in some models.

Causal attention gives them what is before them; here they are computed once more, with what is behind them too. It is
the same plain torch on every device: there are a few hundred of them in a prompt, and none in a decode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kv_cache.fp8 import KVScales, gathered
from .sinks import softmax_with_sinks

# Of queries and keys, so many at a time: 64 MiB of float32.
_MAX_SCORES = 2**24


@dataclass(frozen=True)
class Span:
    """Tokens that see each other: `length` of a batch's, from `start` on, of one sequence.

    They end before the position `end` of it, whose blocks are `block_table`. `in_windows`: only where there are any.
    """

    start: int
    length: int
    end: int
    block_table: Sequence[int]
    in_windows: bool = False
    _views: "dict[int | None, _View]" = field(default_factory=dict, compare=False, repr=False)

    def view(self, block_size: int, sliding_window: int | None, device: torch.device) -> "_View":
        """The same for all layers of one window."""
        if sliding_window not in self._views:
            self._views[sliding_window] = _View.of(self, block_size, sliding_window, device)
        return self._views[sliding_window]


@dataclass(frozen=True)
class _View:
    """What a span sees. blocks: [n] int64; num_keys: how many of their slots, the first ones, have tokens for it.

    hidden: [length, num_keys] bool, which of these a window hides from each token; None: none from any.
    """

    blocks: Tensor
    num_keys: int
    hidden: Tensor | None

    @classmethod
    def of(cls, span: Span, block_size: int, sliding_window: int | None, device: torch.device) -> "_View":
        start = span.end - span.length
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1) // block_size
        table = list(span.block_table[first : -(-span.end // block_size)])
        keys = torch.arange(first * block_size, span.end)
        hidden = None
        if sliding_window is not None:
            hidden = (keys <= torch.arange(start, span.end).unsqueeze(1) - sliding_window).to(device)
        return cls(torch.tensor(table, device=device), len(keys), hidden)


def attend_both_ways(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    spans: Sequence[Span],
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: KVScales,
    sinks: Tensor | None,
) -> None:
    """Overwrite what `output`, of causal attention, has of the spans' tokens. Others: as `paged_attention` has them.

    Each sees all tokens of its span, and of those before it, in the span too, what a window leaves it.
    """
    for span in spans:
        if span.in_windows and sliding_window is None:
            continue
        view = span.view(key_cache.shape[1], sliding_window, query.device)
        caches = ((key_cache, kv_scales.key), (value_cache, kv_scales.value))
        keys, values = (gathered(cache, view.blocks, factor).flatten(0, 1)[: view.num_keys] for cache, factor in caches)
        for part in _parts(span.length, query.shape[1] * view.num_keys):
            tokens = slice(span.start + part.start, span.start + part.stop)
            hidden = None if view.hidden is None else view.hidden[part]
            output[tokens] = _attend(query[tokens].float() * scale, keys, values, hidden, soft_cap, sinks)


def _parts(length: int, scores_per_query: int) -> Iterator[slice]:
    step = max(1, _MAX_SCORES // scores_per_query)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """[n, num_heads, value_dim] float32. query: [n, num_heads, head_dim]; keys, values: [num_keys, num_kv_heads, …]."""
    rows = query.view(len(query), keys.shape[1], -1, query.shape[2])
    scores = torch.einsum("qhgd,khd->hgqk", rows, keys)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    of_heads = None if sinks is None else sinks.view(*scores.shape[:2], 1, 1)
    weights = scores.softmax(-1) if of_heads is None else softmax_with_sinks(scores, of_heads)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
