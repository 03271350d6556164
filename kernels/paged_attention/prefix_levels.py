"""Which runs of KV blocks several sequences of a batch share, level by level.

Where `prefix_groups` gives each sequence one prefix, read whole by each group, here a system prompt is read once for
all, the examples after it once for each group that has them, and so on: the GPU merges as many parts as there are.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .prefix_groups import Gate, common_length


@dataclass(frozen=True)
class SharedSpan:
    """Sequences (by index) that have the same blocks from the one numbered `begin` up to, not including, `end`."""

    members: list[int]
    begin: int
    end: int


def shared_spans(
    block_tables: Sequence[Sequence[int]], num_usable: Sequence[int], is_worth_it: Gate
) -> list[SharedSpan]:
    """The spans that pass the gate. Those of one sequence follow each other without a gap from its first block on.

    `num_usable[i]`: how many of sequence i's blocks may count. What fails the gate is counted to the spans further in.
    """
    search = _Search(block_tables, num_usable, is_worth_it)
    search.descend(list(range(len(block_tables))), 0, 0)
    return search.spans


@dataclass
class _Search:
    block_tables: Sequence[Sequence[int]]
    num_usable: Sequence[int]
    is_worth_it: Gate
    spans: list[SharedSpan] = field(default_factory=list)

    def descend(self, members: list[int], covered: int, depth: int) -> None:
        """Cover what some of `members` share beyond the first `depth` blocks, of which spans hold `covered`."""
        following: dict[int, list[int]] = defaultdict(list)
        for index in members:
            if self.num_usable[index] > depth:
                following[self.block_tables[index][depth]].append(index)
        for bucket in following.values():
            if len(bucket) == 1:
                continue
            end = common_length(self.block_tables, self.num_usable, bucket)
            if self.is_worth_it(len(bucket), end - covered):
                self.spans.append(SharedSpan(bucket, covered, end))
                self.descend(bucket, end, end)
            else:
                self.descend(bucket, covered, end)
