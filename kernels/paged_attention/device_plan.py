"""An attention plan in device memory, at addresses that stay when the next step's plan takes its place."""

from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property

import numpy
import torch
from torch import Tensor

from ..upload import upload
from .batch_layout import Ints
from .plan import ITEM_FIELDS, AttentionPlan

# What a plan may have the device launch: the attention kernel in its two shapes, and the merge of their parts.
LAUNCHES = ("narrow", "wide", "merge_tokens")


class PlanTooLargeError(ValueError):
    """A plan does not fit into the memory set aside for plans."""


@dataclass(frozen=True)
class PlanCapacity:
    """How many of each thing a plan may have. `places`: 64-bit numbers that are no part of it, and change as often."""

    narrow: int
    wide: int
    query_tokens: int
    blocks: int
    merge_tokens: int
    merge_rows: int
    places: int = 0

    @classmethod
    def of(cls, plan: AttentionPlan) -> "PlanCapacity":
        """Room for this plan and no more."""
        return cls(**{field.name: len(getattr(plan, field.name)) for field in fields(cls) if field.name != "places"})

    @cached_property
    def sections(self) -> dict[str, slice]:
        """Where each array lies in one buffer of int32, each from a multiple of 16 bytes on: a kernel is compiled once
        for such addresses, and again for others."""
        sizes = {
            "num_narrow": 1,
            "num_wide": 1,
            "num_merges": 1,
            "wide": self.wide * len(ITEM_FIELDS),
            "query_tokens": self.query_tokens,
            "merge_tokens": self.merge_tokens,
            "merge_starts": self.merge_tokens + 1,
            "merge_rows": self.merge_rows,
            # What changes from one step to the next of the same decodes, the blocks included.
            "places": 2 * self.places,
            "narrow": self.narrow * len(ITEM_FIELDS),
            # By far the longest, and seldom full: at the end, what is not used of it need not be copied.
            "blocks": self.blocks,
        }
        sections, start = {}, 0
        for name, size in sizes.items():
            sections[name] = slice(start, start + size)
            start += -(-size // 4) * 4
        return sections

    @property
    def size(self) -> int:
        return int(self.sections["blocks"].stop)

    def num_bytes(self, num_heads: int, head_dim: int) -> int:
        """What a `DevicePlan` takes, its workspace included."""
        return 4 * (self.size + self.merge_rows * num_heads * (head_dim + 1))


class DevicePlan:
    """A plan where the kernels read it, and the workspace for its parts; at first a plan of nothing.

    Made once with room for any step, it is what a captured launch reads: `load` puts in the next step's plan.
    `launches`: those of `LAUNCHES` that it is for; by default all there is room for.
    """

    def __init__(self, capacity: PlanCapacity, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.capacity = capacity
        self.launches = frozenset(name for name in LAUNCHES if getattr(capacity, name))
        self._buffer = torch.zeros(capacity.size, dtype=torch.int32, device=device)
        self._sections: dict[str, Tensor] = {}
        rows = capacity.merge_rows
        self.partial_output = torch.empty(rows, num_heads, head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(rows, num_heads, dtype=torch.float32, device=device)

    @classmethod
    def holding(cls, plan: AttentionPlan, num_heads: int, head_dim: int, device: torch.device) -> "DevicePlan":
        """Just large enough for `plan`, with it loaded."""
        result = cls(PlanCapacity.of(plan), num_heads, head_dim, device)
        result.load(plan)
        return result

    def launching(self, launches: frozenset[str]) -> "DevicePlan":
        """The same memory, for these launches alone: whoever uses it sees to it that a plan needs no others."""
        result = copy(self)
        result.launches = launches
        return result

    def load(self, plan: AttentionPlan) -> None:
        """Replace the plan, in one copy that the host does not wait for. Raises `PlanTooLargeError`."""
        image = torch.from_numpy(self.image(plan))
        upload(image, self.span(0, len(image)))

    def span(self, begin: int, end: int) -> Tensor:
        """These of its numbers."""
        return self._buffer[begin:end]

    def image(self, plan: AttentionPlan) -> Ints:
        """What the device is to have in place of what it has, up to the last of the plan's blocks.

        Raises `PlanTooLargeError`.
        """
        packed = numpy.zeros(self.capacity.sections["blocks"].start + len(plan.blocks), dtype=numpy.int32)
        counts = {
            "num_narrow": len(plan.narrow),
            "num_wide": len(plan.wide),
            "num_merges": len(plan.merge_tokens),
        }
        for name, section in self.capacity.sections.items():
            if name == "places":
                continue
            values = numpy.array([counts[name]]) if name in counts else getattr(plan, name).ravel()
            if len(values) > section.stop - section.start:
                raise PlanTooLargeError(f"{name} takes {len(values)} of {section.stop - section.start} numbers")
            packed[section.start : section.start + len(values)] = values
        return packed

    def section(self, name: str) -> Tensor:
        """Where an array lies: asked for once, as every layer wants it, and slices take torch longer than a look."""
        if name not in self._sections:
            self._sections[name] = self._buffer[self.capacity.sections[name]]
        return self._sections[name]
