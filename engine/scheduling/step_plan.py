"""What one step is to do. Free of torch."""

import sys
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ..kv_cache.block_hashes import BlockHash
from ..kv_cache.swap import SwappedBlocks
from .decode_rows import DecodeRows
from .scheduled_sequence import ScheduledSequence
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Put a sequence's KV back: `blocks` get the content of `swapped` from its `first`-th block on."""

    swapped: SwappedBlocks
    first: int
    blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """A step's work: blocks go out to the host, then others come back, then the scheduled tokens are computed.

    `budget`: how many more tokens may be scheduled, `budget_beside_urgent`: of these, how many of prompts that are less
    urgent than somebody in the step; `num_tokens`: how many are. `is_ahead`: a step in flight still
    computes, so nobody is preempted; `is_stuck`: somebody would have to be. `decodes`: the scheduled sequences as
    columns, where each of them decodes one token. `num_draft_tokens`: how many of the scheduled tokens are guesses.
    `moved_states`: the sequences that leave another state than they go on from; `snapshots`: those whose state is then
    that of the prefix with this hash.
    """

    budget: int
    budget_beside_urgent: int = sys.maxsize
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swapped_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    swapped_in: list[SwapIn] = field(default_factory=list)
    # The most urgent priority of those preempted for this step.
    preempted_priority: int | None = None
    num_tokens: int = 0
    is_ahead: bool = False
    is_stuck: bool = False
    decodes: DecodeRows | None = None
    num_draft_tokens: int = 0
    moved_states: list[Sequence] = field(default_factory=list)
    snapshots: list[tuple[Sequence, BlockHash]] = field(default_factory=list)
    is_launched: bool = False

    def room_for(self, sequence: Sequence) -> int:
        """How many tokens it may compute, if it is the next one to be scheduled.

        So that somebody who is answered at once does not wait in each step for a job's prompts.
        """
        room = min(self.budget, self.budget_beside_urgent) if self.makes_urgent_wait(sequence) else self.budget
        # An image that may not be cut may have taken more than there was.
        return max(room, 0)

    def makes_urgent_wait(self, sequence: Sequence) -> bool:
        """Whether it has a prompt, or what is left of one, to compute beside somebody more urgent."""
        # The most urgent is scheduled first.
        is_less_urgent = bool(self.scheduled) and self.scheduled[0].sequence.priority < sequence.priority
        return is_less_urgent and sequence.num_uncomputed_tokens > 1

    def schedule(self, sequence: Sequence, num_tokens: int, is_new: bool, draft: tuple[int, ...] = ()) -> None:
        if self.makes_urgent_wait(sequence):
            self.budget_beside_urgent -= num_tokens
        reaches_end = num_tokens == sequence.num_uncomputed_tokens
        num_tokens += len(draft)
        self.scheduled.append(ScheduledSequence(sequence, num_tokens, reaches_end, is_new, draft))
        self.num_tokens += num_tokens
        self.num_draft_tokens += len(draft)
        self.budget -= num_tokens

    def schedule_decodes(self, decodes: list[ScheduledSequence]) -> None:
        """Schedule a token of each of these."""
        self.scheduled += decodes
        self.num_tokens += len(decodes)
        self.budget -= len(decodes)

    def put_guesses(self, guesses: Iterable[SequenceOf[int]]) -> None:
        """Let these, one for each that is to have a draft, be what was held free for them."""
        drafts = iter(guesses)
        self.scheduled = [
            item._replace(draft=tuple(next(drafts)[: len(item.draft)])) if item.draft else item
            for item in self.scheduled
        ]

    def admits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may begin: not if it would take the blocks that one as urgent has just given up.

        It would have to give them up again in the next step.
        """
        return self.preempted_priority is None or sequence.priority < self.preempted_priority
