"""Who owns which KV block."""

from collections.abc import Iterable, Sequence

# Stands in a block table where a sequence no longer needs what was there, and where tables are padded. It is never
# handed out, so what lies in it stays zero.
NULL_BLOCK = 0


class BlockPool:
    """Reference counts over the KV blocks 1 to `num_blocks` and the list of those that hold nothing.

    A block is free (no owner, no content worth keeping), owned (by one or more sequences) or idle (no owner, but
    its content is still wanted: the prefix cache decides when to `reclaim` it).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._reference_counts = [0] * (num_blocks + 1)
        # Handed out from the end, so that lately used memory is used again first.
        self._free = list(range(num_blocks, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; each is owned once. The caller has checked `num_free`."""
        first = len(self._free) - count
        blocks = self._free[first:][::-1]
        del self._free[first:]
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Add an owner to blocks that are owned or idle; returns those that were idle."""
        counts = self._reference_counts
        idle = []
        for block in blocks:
            if not counts[block]:
                idle.append(block)
            counts[block] += 1
        return idle

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._reference_counts[block] > 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Take an owner away from each; returns those that are idle now, as that was the last one."""
        counts = self._reference_counts
        idle = []
        for block in blocks:
            assert counts[block] > 0, f"block {block} released more often than it was taken"
            counts[block] -= 1
            if not counts[block]:
                idle.append(block)
        return idle

    def reclaim(self, block: int) -> None:
        """Make an idle block free."""
        assert self._reference_counts[block] == 0, f"block {block} is still owned"
        self._free.append(block)

    def owners(self) -> dict[int, int]:
        """How many owners each owned block has; for checks, not for the hot path."""
        return {block: count for block, count in enumerate(self._reference_counts) if count}

    def free(self) -> Iterable[int]:
        """The blocks that hold nothing; for checks, not for the hot path."""
        return tuple(self._free)
