"""Which sequences of a batch begin with the same KV blocks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .batch_layout import BatchLayout

# Where sharing pays on a CPU (benchmarks/bench_shared_prefix.py): where it spares the reading of this many keys, and
# where each sequence has few queries, since with many the prefix is read for them all in one go anyway.
MIN_SPARED_TOKENS = 2048
MAX_SHARING_QUERIES = 16

# Whether so many sequences that share so many blocks are worth a group of their own.
Gate = Callable[[int, int], bool]


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences (by index) whose first `num_blocks` blocks are the same; 0 where nothing worth it is shared."""

    members: list[int]
    num_blocks: int


def groups_that_pay(batch: BatchLayout) -> list[PrefixGroup]:
    """A batch's sequences, those that share a prefix set apart where that pays on a CPU."""
    # Blocks that all queries of a sequence see whole: those filled before this step.
    num_usable = [
        (context - queries) // batch.block_size if queries <= MAX_SHARING_QUERIES else 0
        for context, queries in zip(batch.context_lens, batch.query_lens, strict=True)
    ]
    return prefix_groups(
        batch.block_tables,
        num_usable,
        lambda sequences, blocks: (sequences - 1) * blocks * batch.block_size >= MIN_SPARED_TOKENS,
    )


def prefix_groups(
    block_tables: Sequence[Sequence[int]], num_usable: Sequence[int], is_worth_it: Gate
) -> list[PrefixGroup]:
    """Every sequence in one group, with the longest prefix for which its group passes the gate.

    Of nested prefixes (a system prompt, then one of several examples) a sequence is grouped by the whole of its own;
    those whose inner part too few share stay with the outer one. `num_usable[i]`: how many of sequence i's blocks may
    count.
    """
    search = _Search(block_tables, num_usable, is_worth_it)
    rest = search.split(list(range(len(block_tables))), 0)
    return search.groups + ([PrefixGroup(rest, 0)] if rest else [])


@dataclass
class _Search:
    block_tables: Sequence[Sequence[int]]
    num_usable: Sequence[int]
    is_worth_it: Gate
    groups: list[PrefixGroup] = field(default_factory=list)

    def split(self, members: list[int], depth: int) -> list[int]:
        """Group `members`, which share their first `depth` blocks; returns those left to the outer prefix."""
        following: dict[int, list[int]] = defaultdict(list)
        left: list[int] = []
        for index in members:
            if self.num_usable[index] > depth:
                following[self.block_tables[index][depth]].append(index)
            else:
                left.append(index)
        for bucket in following.values():
            if len(bucket) > 1:
                left += self.split(bucket, common_length(self.block_tables, self.num_usable, bucket))
            else:
                left += bucket
        if depth and self.is_worth_it(len(left), depth):
            self.groups.append(PrefixGroup(left, depth))
            return []
        return left


def common_length(block_tables: Sequence[Sequence[int]], num_usable: Sequence[int], members: Sequence[int]) -> int:
    """How many usable blocks all members begin with: as many as the first and the last in their order do."""
    # All lists, or all arrays: they compare by what is in them.
    tables: list[Any] = [block_tables[index] for index in members]
    first, last = min(tables), max(tables)
    limit = min(num_usable[index] for index in members)
    for index, (block, other) in enumerate(zip(first[:limit], last[:limit], strict=False)):
        if block != other:
            return index
    return limit
