"""A batch's layout, worked out once a step and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each sequence's queries, keys and values are.

    query_lens: new tokens of each sequence. context_lens: all its tokens so far, the new ones included.
    block_tables: its KV blocks, in order, enough for `context_lens`. All lists have one entry a sequence.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    block_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @cached_property
    def query_starts(self) -> list[int]:
        """Index of each sequence's first query among the batch's tokens."""
        starts, total = [], 0
        for length in self.query_lens:
            starts.append(total)
            total += length
        return starts

    @cached_property
    def padded_groups(self) -> list["PaddedGroup"]:
        """The sequences in groups of similar lengths, for kernels that compute on padded rectangles."""
        return [PaddedGroup.build(self, members) for members in _similar_lengths(self)]


@dataclass(frozen=True)
class PaddedGroup:
    """Some sequences of a batch as rectangles of queries × keys.

    token_index: [n, max_query] int64, which of the batch's tokens each query is (0 where padded).
    is_query: [n, max_query] bool. blocks: [n, max_blocks] int64 (0 where padded).
    query_positions: [n, max_query] int64, each query's position in its sequence.
    """

    token_index: Tensor
    is_query: Tensor
    blocks: Tensor
    query_positions: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, metadata: AttentionMetadata, members: Sequence[int]) -> "PaddedGroup":
        lens = torch.tensor([metadata.query_lens[i] for i in members])
        contexts = torch.tensor([metadata.context_lens[i] for i in members])
        starts = torch.tensor([metadata.query_starts[i] for i in members])
        offsets = torch.arange(int(lens.max())).unsqueeze(0)
        is_query = offsets < lens.unsqueeze(1)
        max_blocks = -(-int(contexts.max()) // metadata.block_size)
        tables = [list(metadata.block_tables[i][:max_blocks]) for i in members]
        blocks = torch.tensor([table + [0] * (max_blocks - len(table)) for table in tables])
        device = metadata.device
        return cls(
            token_index=((starts.unsqueeze(1) + offsets) * is_query).to(device),
            is_query=is_query.to(device),
            blocks=blocks.to(device),
            query_positions=((contexts - lens).unsqueeze(1) + offsets).to(device),
        )

    def mask(self, num_keys: int, sliding_window: int | None) -> Tensor:
        """[n, 1, max_query, num_keys] bool, true where a query sees a key; the same for all layers of one window."""
        if sliding_window not in self.masks:
            keys = torch.arange(num_keys, device=self.blocks.device)
            positions = self.query_positions.unsqueeze(-1)
            visible = keys <= positions
            if sliding_window is not None:
                visible &= keys > positions - sliding_window
            self.masks[sliding_window] = visible.unsqueeze(1)
        return self.masks[sliding_window]


def _similar_lengths(metadata: AttentionMetadata) -> list[list[int]]:
    """Indices of sequences, grouped so that padding at most doubles either side of a group's rectangle."""
    order = sorted(range(len(metadata.query_lens)), key=lambda i: (metadata.query_lens[i], metadata.context_lens[i]))
    groups: list[list[int]] = []
    shortest = longest = 0
    for i in order:
        context = metadata.context_lens[i]
        fits_keys = max(longest, context) <= 2 * min(shortest, context)
        # Sorted by queries, so a group's first member has the fewest.
        if groups and fits_keys and metadata.query_lens[i] <= 2 * metadata.query_lens[groups[-1][0]]:
            groups[-1].append(i)
            shortest, longest = min(shortest, context), max(longest, context)
        else:
            groups.append([i])
            shortest = longest = context
    return groups
