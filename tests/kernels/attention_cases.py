"""Batches to attend to: caches whose blocks belong to their sequences in random order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.paged_attention import AttentionMetadata, paged_attention, paged_attention_reference

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """A batch: each sequence's new tokens and all its tokens, and the model's and the cache's sizes.

    value_dim: so many of a key's first numbers are its value.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    value_dim: int | None = None

    def __str__(self) -> str:
        lens = "+".join(f"{q}of{c}" for q, c in zip(self.query_lens, self.context_lens, strict=True))
        value = "" if self.value_dim is None else f"v{self.value_dim}"
        return f"{lens}-h{self.num_heads}kv{self.num_kv_heads}d{self.head_dim}{value}-b{self.block_size}"


@dataclass(frozen=True)
class Case:
    """Tensors of a `Shape`: caches whose blocks belong to the sequences in random order, zeros elsewhere."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata
    scale: float

    @classmethod
    def build(cls, shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> "Case":
        generator = torch.Generator().manual_seed(3)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(dtype)

        counts = [-(-length // shape.block_size) for length in shape.context_lens]
        num_blocks = sum(counts) + 3
        shuffled = torch.randperm(num_blocks, generator=generator).tolist()
        tables = [[shuffled.pop() for _ in range(count)] for count in counts]
        caches = torch.zeros(2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=dtype)
        for table, length in zip(tables, shape.context_lens, strict=True):
            for position in range(length):
                block, offset = divmod(position, shape.block_size)
                caches[:, table[block], offset] = randn(2, shape.num_kv_heads, shape.head_dim)
        key_cache, value_cache = caches[0].to(device), caches[1].to(device)
        if shape.value_dim is not None:
            value_cache = key_cache[..., : shape.value_dim]
        return cls(
            query=randn(sum(shape.query_lens), shape.num_heads, shape.head_dim).to(device),
            key_cache=key_cache,
            value_cache=value_cache,
            metadata=AttentionMetadata(shape.query_lens, shape.context_lens, tables, shape.block_size, device),
            scale=shape.head_dim**-0.5,
        )

    def run(self, sliding_window: int | None = None) -> Tensor:
        return paged_attention(self.query, self.key_cache, self.value_cache, self.metadata, self.scale, sliding_window)

    def reference(self, sliding_window: int | None = None) -> Tensor:
        return paged_attention_reference(
            self.query, self.key_cache, self.value_cache, self.metadata, self.scale, sliding_window
        )


MIXED = Shape(query_lens=(1, 5, 1, 33, 1, 2, 17), context_lens=(1, 5, 70, 33, 16, 49, 64))
