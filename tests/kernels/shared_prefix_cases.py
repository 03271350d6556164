"""Batches of sequences that share KV blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.paged_attention import AttentionMetadata

from .attention_cases import CPU

# A system prompt of ten blocks, two examples after it, and a prompt of its own.
SYSTEM = list(range(100, 110))
FIRST, SECOND = [*SYSTEM, 200, 201, 202], [*SYSTEM, 300]
OTHER = list(range(400, 408))


@dataclass(frozen=True)
class Row:
    """A sequence: the blocks it shares with others, its own tokens after them, and how many of those are new."""

    prefix: list[int]
    own_tokens: int
    new_tokens: int = 1


NESTED = [
    *(Row(FIRST, own, 1) for own in (1, 5, 16, 17, 40)),
    *(Row(SECOND, own, 2) for own in (2, 30, 31)),
    *(Row(OTHER, own, 1) for own in (1, 1)),
    Row([], 70, 70),
    Row([], 9, 1),
]
BATCHES = {
    "decodes": [Row(SYSTEM, own) for own in (1, 2, 16, 33)],
    "nested": NESTED,
    "chunks": [Row(SYSTEM, own, new) for own, new in ((40, 16), (20, 9), (3, 3), (1, 1))],
    "long-chunks-apart": [Row(SYSTEM, 60, 50), Row(SYSTEM, 1), Row(SYSTEM, 2), Row(SYSTEM, 80, 80)],
}


def build(rows: list[Row], block_size: int = 16, device: torch.device = CPU) -> AttentionMetadata:
    """The batch's layout; own blocks are numbered from 1000 on."""
    fresh = iter(range(1000, 2000))
    tables = [[*row.prefix, *(next(fresh) for _ in range(-(-row.own_tokens // block_size)))] for row in rows]
    contexts = [len(row.prefix) * block_size + row.own_tokens for row in rows]
    return AttentionMetadata([row.new_tokens for row in rows], contexts, tables, block_size, device)


def tensors(
    metadata: AttentionMetadata, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(metadata.num_tokens, heads, dim, generator=generator)
    caches = torch.randn(2, 1100, metadata.block_size, kv_heads, dim, generator=generator).to(metadata.device, dtype)
    return query.to(metadata.device, dtype), caches[0], caches[1]
