"""What a preempted sequence's KV costs to keep in the host's memory, and who has it there. Free of torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PreemptionCosts:
    """What it takes to get a preempted sequence's KV back.

    `seconds_per_token`: computing a token again. `seconds_per_byte`: one way between device and host.
    `seconds_per_swap`: what a copy takes whatever its size.
    """

    seconds_per_token: float
    seconds_per_byte: float
    seconds_per_swap: float


def is_swap_cheaper(costs: PreemptionCosts, num_tokens: int, num_bytes: int) -> bool:
    """Whether moving `num_bytes` out and back takes less time than computing `num_tokens` again.

    Both grow with the sequence, so that mostly the model decides: 8 billion parameters take 16 GFLOP a token, its KV
    128 KiB. A model of costs, not a measurement of the last steps, so that the same requests make the same schedule.
    """
    swapping = 2 * (costs.seconds_per_swap + num_bytes * costs.seconds_per_byte)
    return swapping < num_tokens * costs.seconds_per_token


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """A sequence's KV in the host's memory: `num_blocks` blocks from the `first_block`-th of its table on.

    They make `num_computed_tokens` of it computed again once they are back, provided what comes before them is there.
    `content` is the runner's; there is none before the step that moves them out.
    """

    first_block: int
    num_blocks: int
    num_computed_tokens: int
    content: Any = None


class SwapSpace:
    """How many blocks the host may hold, and which way of preemption is cheaper."""

    def __init__(self, num_blocks: int, block_bytes: int, costs: PreemptionCosts) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self._block_bytes = block_bytes
        self._costs = costs

    def take(
        self, first_block: int, num_blocks: int, num_computed_tokens: int, block_size: int
    ) -> SwappedBlocks | None:
        """Room for a sequence's blocks; None where there is none, or where computing them again is cheaper."""
        num_tokens = num_computed_tokens - first_block * block_size
        if not 0 < num_blocks <= self.num_blocks - self.num_used:
            return None
        if not is_swap_cheaper(self._costs, num_tokens, num_blocks * self._block_bytes):
            return None
        self.num_used += num_blocks
        return SwappedBlocks(first_block, num_blocks, num_computed_tokens)

    def give_back(self, swapped: SwappedBlocks) -> None:
        """The room is free again."""
        self.num_used -= swapped.num_blocks
