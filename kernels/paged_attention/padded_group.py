"""Sequences of similar lengths as rectangles, for kernels that compute on such."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch_layout import BatchLayout
from .latent_values import gather


@dataclass(frozen=True)
class PaddedGroup:
    """Some sequences of a batch as rectangles of queries × keys.

    token_index: [n, max_query] int64, which of the batch's tokens each query is (0 where padded). is_query:
    [n, max_query] bool. tokens: [number of queries] int64, `token_index` where `is_query`. prefix_blocks:
    [num_prefix_blocks] int64, blocks that all sequences begin with, or None. blocks: [n, max_blocks] int64, each
    sequence's blocks after those (0 where padded). unwritten: [2, m] int64, the sequences and the slots of their
    `blocks` that lie beyond their tokens. query_positions: [n, max_query] int64, each query's position, counted from
    the end of the prefix blocks.
    """

    token_index: Tensor
    is_query: Tensor
    tokens: Tensor
    prefix_blocks: Tensor | None
    blocks: Tensor
    unwritten: Tensor
    query_positions: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls, batch: BatchLayout, members: Sequence[int], num_prefix_blocks: int, device: torch.device
    ) -> "PaddedGroup":
        lens = torch.tensor([batch.query_lens[i] for i in members])
        contexts = torch.tensor([batch.context_lens[i] for i in members])
        starts = torch.tensor([batch.query_starts[i] for i in members])
        offsets = torch.arange(int(lens.max())).unsqueeze(0)
        is_query = offsets < lens.unsqueeze(1)
        token_index = (starts.unsqueeze(1) + offsets) * is_query
        first_position = contexts - lens - num_prefix_blocks * batch.block_size
        prefix = torch.tensor(batch.block_tables[members[0]][:num_prefix_blocks]) if num_prefix_blocks else None
        blocks = _own_blocks(batch, members, num_prefix_blocks)
        own_lens = contexts - num_prefix_blocks * batch.block_size
        return cls(
            token_index=token_index.to(device),
            is_query=is_query.to(device),
            tokens=token_index[is_query].to(device),
            prefix_blocks=prefix.to(device) if prefix is not None else None,
            blocks=blocks.to(device),
            unwritten=_unwritten(blocks, own_lens, batch.block_size).to(device),
            query_positions=(first_position.unsqueeze(1) + offsets).to(device),
        )

    def gathered(self, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values of `blocks`, [n, num_keys, num_kv_heads, head_dim].

        Zeros where the sequence has written none: what others have left there is behind the mask, but zero weight
        times NaN would be NaN.
        """
        rows, slots = self.unwritten
        keys, values = (each.flatten(1, 2) for each in gather(key_cache, value_cache, self.blocks))
        if len(rows):
            keys[rows, slots] = 0
            values[rows, slots] = 0
        return keys, values

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


def _own_blocks(batch: BatchLayout, members: Sequence[int], first: int) -> Tensor:
    """The members' blocks from the one numbered `first` on, padded with block 0."""
    last = -(-max(batch.context_lens[i] for i in members) // batch.block_size)
    tables = [list(batch.block_tables[i][first:last]) for i in members]
    return torch.tensor([table + [0] * (last - first - len(table)) for table in tables])


def _unwritten(blocks: Tensor, own_lens: Tensor, block_size: int) -> Tensor:
    """[2, m]: rows and slots of `blocks` beyond so many tokens each; not of block 0, which is zero."""
    slots = torch.arange(blocks.shape[1] * block_size)
    is_beyond = (slots >= own_lens.unsqueeze(1)) & (blocks != 0).repeat_interleave(block_size, 1)
    return is_beyond.nonzero().T


def similar_lengths(batch: BatchLayout, members: Sequence[int]) -> list[list[int]]:
    """The members, grouped so that padding at most doubles either side of a group's rectangle."""
    order = sorted(members, key=lambda i: (batch.query_lens[i], batch.context_lens[i]))
    groups: list[list[int]] = []
    shortest = longest = 0
    for i in order:
        context = batch.context_lens[i]
        fits_keys = max(longest, context) <= 2 * min(shortest, context)
        # Sorted by queries, so a group's first member has the fewest.
        if groups and fits_keys and batch.query_lens[i] <= 2 * batch.query_lens[groups[-1][0]]:
            groups[-1].append(i)
            shortest, longest = min(shortest, context), max(longest, context)
        else:
            groups.append([i])
            shortest = longest = context
    return groups
