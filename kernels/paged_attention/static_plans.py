"""Attention's plans for captured steps: memory for any step's, at addresses that stay."""

from dataclasses import replace

import numpy
import torch
from torch import Tensor

from .attention_shape import PlanKey
from .decode_step import DecodeStep
from .device_plan import LAUNCHES, DevicePlan, PlanCapacity
from .followed_plan import FollowedPlan, Places
from .metadata import AttentionMetadata
from .plan import AttentionPlan, Tiling
from .planning import plan_attention

# A query may be in its own part and those of so many nested prefixes: a system prompt, examples, a document.
_MAX_LEVELS = 3
# Of a plan's memory for block tables, 16 MiB: what 256 sequences of 262,144 tokens take in blocks of 16.
_MAX_BLOCKS = 4 * 1024**2
# By so many a sequence that decodes may grow before its plan is made anew: segments are still about even then.
_BLOCKS_AHEAD = 4
NO_PLACES: Places = numpy.empty(0, dtype=numpy.int64)


class StaticPlans:
    """A plan for each kind of layer that a model has, with room for steps of up to `num_tokens` tokens.

    `keys`: what the plans of the model's layers depend on. `blocks_per_sequence`: the longest block table.
    `num_places`: how many numbers of each step's own go along with the plans, so that all takes one copy.
    """

    def __init__(
        self,
        keys: list[PlanKey],
        num_tokens: int,
        blocks_per_sequence: int,
        block_size: int,
        device: torch.device,
        num_places: int = 0,
    ) -> None:
        self._block_size, self._device = block_size, device
        self._held: dict[PlanKey, DevicePlan] = {}
        for key in keys:
            shape = key[0]
            capacity = step_capacity(num_tokens, blocks_per_sequence, shape.tiling(device))
            # The first plan takes them all along.
            capacity = replace(capacity, places=0 if self._held else num_places)
            self._held[key] = DevicePlan(capacity, shape.num_heads, shape.head_dim, device)
        # Of the step whose plans are held, if all decode there: they go on with those that follow, up to the number.
        self._last: DecodeStep | None = None
        self._last_number = 0
        self._followed: list[FollowedPlan] = []
        self._launches: frozenset[str] = frozenset()

    @property
    def places(self) -> Tensor:
        """[num_places] int64: the memory for a step's places."""
        return next(iter(self._held.values())).section("places").view(torch.int64)

    def load(self, metadata: AttentionMetadata, places: Places = NO_PLACES) -> frozenset[str]:
        """Put in a step's plans and places, without waiting for the device; returns which launches they need, all kinds
        together.

        The plans of a step that follows the last one go on from that. Raises `PlanTooLargeError`; what is held is of no
        use then.
        """
        last, self._last = self._last, None
        step = metadata.decode_step
        if step is not None and step.follows(last) and step.number <= self._last_number:
            for followed in self._followed:
                followed.advance(step, places)
                places = NO_PLACES
        else:
            self._replace(metadata, places)
        self._last = step
        return self._launches

    def _replace(self, metadata: AttentionMetadata, places: Places) -> None:
        step = metadata.decode_step
        room = _BLOCKS_AHEAD if step is not None else 0
        plans = {key: plan_attention(metadata, *key, room=room) for key in self._held}
        self._launches = needed_launches(list(plans.values()))
        self._followed = []
        for key, plan in plans.items():
            self._followed.append(FollowedPlan(plan, self._held[key], places))
            places = NO_PLACES
        self._last_number = step.number + room * self._block_size if step is not None else 0

    def metadata(self, num_tokens: int, launches: frozenset[str]) -> AttentionMetadata:
        """For a step of so many tokens, padding included, whose attention is what the plans say when it runs."""
        result = AttentionMetadata(
            [1] * num_tokens, [1] * num_tokens, [[0]] * num_tokens, self._block_size, self._device
        )
        result.device_plans.update({key: held.launching(launches) for key, held in self._held.items()})
        return result


def plan_bytes(keys: list[PlanKey], num_tokens: int, blocks_per_sequence: int, device: torch.device) -> int:
    """How much of the device's memory `StaticPlans` takes."""
    return sum(
        step_capacity(num_tokens, blocks_per_sequence, shape.tiling(device)).num_bytes(shape.num_heads, shape.head_dim)
        for shape, _ in keys
    )


def needed_launches(plans: list[AttentionPlan]) -> frozenset[str]:
    """One of three sets, so that few graphs serve all steps: narrow alone, with a merge, or everything."""
    if any(len(plan.wide) for plan in plans):
        return frozenset(LAUNCHES)
    if any(len(plan.merge_tokens) for plan in plans):
        return frozenset(("narrow", "merge_tokens"))
    return frozenset(("narrow",))


def step_capacity(num_tokens: int, blocks_per_sequence: int, tiling: Tiling) -> PlanCapacity:
    """Room for the plan of any step of up to `num_tokens` tokens with at most `_MAX_LEVELS` nested prefixes."""
    # Each token once in its own sequence, and once a level.
    entries = num_tokens * (1 + _MAX_LEVELS)
    narrow_cuts, wide_cuts = tiling.max_narrow_cuts, tiling.max_wide_cuts
    return PlanCapacity(
        # One for each sequence and, since prefixes form a tree whose leaves sequences are, fewer than that for these.
        narrow=2 * num_tokens + narrow_cuts,
        # A run is wide from `narrow_queries + 1` queries on; each may end on a Q-block that is not full.
        wide=entries // (tiling.narrow_queries + 1) + entries // tiling.wide_queries + wide_cuts,
        query_tokens=entries,
        blocks=min(num_tokens * (blocks_per_sequence + _BLOCKS_AHEAD), _MAX_BLOCKS),
        merge_tokens=num_tokens,
        merge_rows=entries + narrow_cuts * tiling.narrow_queries + wide_cuts * tiling.wide_queries,
    )
