"""A batch's layout, worked out once a step and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from .attention_shape import PlanKey
from .batch_layout import BatchLayout
from .decode_step import DecodeStep
from .device_plan import DevicePlan
from .native_layout import NativeLayout, native_layout_of
from .padded_group import PaddedGroup, similar_lengths
from .prefix_groups import PrefixGroup, groups_that_pay
from .two_way import Span


@dataclass(frozen=True)
class AttentionMetadata(BatchLayout):
    """A batch's layout, and what the kernels of each kind make of it, worked out by the first layer that needs it."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # Where each sequence decodes a token, as it did in the step before.
    decode_step: DecodeStep | None = field(default=None, compare=False, repr=False)
    # Which of its tokens see those behind them too.
    spans: Sequence[Span] = ()
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
        return [padded for group in groups_that_pay(self) for padded in self._pad(group)]

    def _pad(self, group: PrefixGroup) -> list[PaddedGroup]:
        alike = similar_lengths(self, group.members)
        return [PaddedGroup.build(self, members, group.num_blocks, self.device) for members in alike]
