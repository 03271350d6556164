"""A batch's layout, worked out once a step and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .attention_shape import PlanKey
from .batch_layout import BatchLayout
from .decode_step import DecodeStep
from .device_plan import DevicePlan
from .native_layout import NativeLayout, native_layout_of
from .prefix_groups import PrefixGroup, prefix_groups

# Where sharing pays on a CPU (benchmarks/bench_shared_prefix.py): where it spares the reading of this many keys, and
# where each sequence has few queries, since with many the prefix is read for them all in one go anyway.
MIN_SPARED_TOKENS = 2048
MAX_SHARING_QUERIES = 16


@dataclass(frozen=True)
class AttentionMetadata(BatchLayout):
    """A batch's layout, and what the kernels of each kind make of it, worked out by the first layer that needs it."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # Where each sequence decodes a token, as it did in the step before.
    decode_step: DecodeStep | None = field(default=None, compare=False, repr=False)
    # The GPU's plans of this batch, by what else they depend on: filled by `triton.py`.
    device_plans: dict[PlanKey, DevicePlan] = field(init=False, default_factory=dict, compare=False, repr=False)

    @cached_property
    def native_layout(self) -> NativeLayout:
        """The layout as flat arrays, for the compiled kernel."""
        return native_layout_of(self, self.decode_step)

    @cached_property
    def padded_groups(self) -> list["PaddedGroup"]:
        """The sequences in groups of similar lengths, for kernels that compute on padded rectangles."""
        return self._pad(PrefixGroup(list(range(len(self.query_lens))), 0))

    @cached_property
    def shared_groups(self) -> list["PaddedGroup"]:
        """Like `padded_groups`, with sequences that share a prefix set apart where that pays."""
        groups = prefix_groups(self.block_tables, self._num_shareable_blocks, self._is_worth_sharing)
        return [padded for group in groups for padded in self._pad(group)]

    @property
    def _num_shareable_blocks(self) -> list[int]:
        """How many of each sequence's blocks all its queries see whole: those filled before this step."""
        return [
            (context - queries) // self.block_size if queries <= MAX_SHARING_QUERIES else 0
            for context, queries in zip(self.context_lens, self.query_lens, strict=True)
        ]

    def _is_worth_sharing(self, num_sequences: int, num_blocks: int) -> bool:
        return (num_sequences - 1) * num_blocks * self.block_size >= MIN_SPARED_TOKENS

    def _pad(self, group: PrefixGroup) -> list["PaddedGroup"]:
        return [PaddedGroup.build(self, members, group.num_blocks) for members in _similar_lengths(self, group.members)]


@dataclass(frozen=True)
class PaddedGroup:
    """Some sequences of a batch as rectangles of queries × keys.

    token_index: [n, max_query] int64, which of the batch's tokens each query is (0 where padded). is_query:
    [n, max_query] bool. tokens: [number of queries] int64, `token_index` where `is_query`. prefix_blocks:
    [num_prefix_blocks] int64, blocks that all sequences begin with, or None. blocks: [n, max_blocks] int64, each
    sequence's blocks after those (0 where padded). query_positions: [n, max_query] int64, each query's position,
    counted from the end of the prefix blocks.
    """

    token_index: Tensor
    is_query: Tensor
    tokens: Tensor
    prefix_blocks: Tensor | None
    blocks: Tensor
    query_positions: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, metadata: AttentionMetadata, members: Sequence[int], num_prefix_blocks: int = 0) -> "PaddedGroup":
        lens = torch.tensor([metadata.query_lens[i] for i in members])
        contexts = torch.tensor([metadata.context_lens[i] for i in members])
        starts = torch.tensor([metadata.query_starts[i] for i in members])
        offsets = torch.arange(int(lens.max())).unsqueeze(0)
        is_query = offsets < lens.unsqueeze(1)
        token_index = (starts.unsqueeze(1) + offsets) * is_query
        first_position = contexts - lens - num_prefix_blocks * metadata.block_size
        prefix = torch.tensor(metadata.block_tables[members[0]][:num_prefix_blocks]) if num_prefix_blocks else None
        device = metadata.device
        return cls(
            token_index=token_index.to(device),
            is_query=is_query.to(device),
            tokens=token_index[is_query].to(device),
            prefix_blocks=prefix.to(device) if prefix is not None else None,
            blocks=_own_blocks(metadata, members, num_prefix_blocks).to(device),
            query_positions=(first_position.unsqueeze(1) + offsets).to(device),
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


def _own_blocks(metadata: AttentionMetadata, members: Sequence[int], first: int) -> Tensor:
    """The members' blocks from the one numbered `first` on, padded with block 0."""
    last = -(-max(metadata.context_lens[i] for i in members) // metadata.block_size)
    tables = [list(metadata.block_tables[i][first:last]) for i in members]
    return torch.tensor([table + [0] * (last - first - len(table)) for table in tables])


def _similar_lengths(metadata: AttentionMetadata, members: Sequence[int]) -> list[list[int]]:
    """The members, grouped so that padding at most doubles either side of a group's rectangle."""
    order = sorted(members, key=lambda i: (metadata.query_lens[i], metadata.context_lens[i]))
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
