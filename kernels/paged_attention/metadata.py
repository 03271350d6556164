"""A batch's layout, worked out once a step and used by every layer."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from .attention_shape import PlanKey
from .batch_layout import BatchLayout
from .decode_step import DecodeStep
from .device_plan import DevicePlan
from .native_layout import NativeLayout, native_layout_of
from .padded_group import PaddedGroup, similar_lengths
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
    def padded_groups(self) -> list[PaddedGroup]:
        """The sequences in groups of similar lengths, for kernels that compute on padded rectangles."""
        return self._pad(PrefixGroup(list(range(len(self.query_lens))), 0))

    @cached_property
    def shared_groups(self) -> list[PaddedGroup]:
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

    def _pad(self, group: PrefixGroup) -> list[PaddedGroup]:
        alike = similar_lengths(self, group.members)
        return [PaddedGroup.build(self, members, group.num_blocks, self.device) for members in alike]
