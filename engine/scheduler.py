"""Which sequences compute how many tokens in the next step. Policy only: no torch."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .prefix_cache import PrefixCache
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` of `sequence`, from its first uncomputed one on, are computed in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the step computes the sequence's last token, so that its logits are wanted."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Continuous batching over one token budget a step, with chunked prefill and preemption by recompute.

    Every sequence added must fit the KV memory when alone; then some sequence always advances.
    """

    def __init__(self, cache: PrefixCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        # In order of admission: the last one is the first to be preempted.
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def add_first(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences at the head of the queue: they continue a request that has already been served in part."""
        self.waiting.extendleft(reversed(list(sequences)))

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's work; allocates its blocks and makes them findable for later sequences.

        Blocks are findable as soon as the step that fills them is chosen: within a step every layer writes all its
        KV before attention reads any, so that sequences with the same new prefix compute it once even when they
        are admitted together.
        """
        scheduled: list[ScheduledSequence] = []
        preempted_before = self.num_preemptions
        budget = self._continue_running(scheduled, self._max_num_batched_tokens)
        if self.num_preemptions == preempted_before:
            self._admit_waiting(scheduled, budget)
        return scheduled

    def _continue_running(self, scheduled: list[ScheduledSequence], budget: int) -> int:
        """Phase 1: what runs goes on; where blocks run out, the latest comer gives up its own.

        Returns what is left of the budget.
        """
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            while not self._can_grow(sequence, num_tokens) and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
            if not self._can_grow(sequence, num_tokens):
                self._preempt(sequence)
                break
            scheduled.append(self._grow(sequence, num_tokens))
            budget -= num_tokens
            position += 1
        return budget

    def _admit_waiting(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        """Phase 2: newcomers in order, as far as budget, slots and blocks reach."""
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            self._attach_cached_prefix(sequence)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if not self._can_grow(sequence, num_tokens):
                self._detach(sequence)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.was_admitted = True
            scheduled.append(self._grow(sequence, num_tokens))
            budget -= num_tokens

    def _attach_cached_prefix(self, sequence: Sequence) -> None:
        """Own the cached blocks of the sequence's beginning; its last token is always left to compute."""
        usable = (sequence.num_tokens - 1) // sequence.block_size
        blocks = self._cache.match(sequence.hashes()[:usable])
        self._cache.share(blocks)
        sequence.block_table = blocks
        sequence.num_computed_tokens = len(blocks) * sequence.block_size
        if not sequence.was_admitted:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)

    def _num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        needed = sequence.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        return needed - len(sequence.block_table)

    def _can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._num_new_blocks(sequence, num_tokens) <= self._cache.num_available

    def _grow(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        sequence.block_table += self._cache.allocate(self._num_new_blocks(sequence, num_tokens))
        first_full = sequence.num_computed_tokens // sequence.block_size
        last_full = (sequence.num_computed_tokens + num_tokens) // sequence.block_size
        hashes = sequence.hashes()
        for index in range(first_full, last_full):
            self._cache.insert(sequence.block_table[index], hashes[index])
        return ScheduledSequence(sequence, num_tokens)

    def complete(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Record that a step's tokens are computed."""
        for item in scheduled:
            item.sequence.num_computed_tokens += item.num_tokens

    def roll_back(self, scheduled: list[ScheduledSequence]) -> None:
        """Undo a step that failed: its sequences wait again, and no block it was to fill can be found."""
        for item in scheduled:
            first_unwritten = item.sequence.num_computed_tokens // item.sequence.block_size
            for block in item.sequence.block_table[first_unwritten:]:
                self._cache.forget(block)
        for item in reversed(scheduled):
            self._requeue(item.sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a running or waiting sequence out and give up its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._detach(sequence)

    def check(self) -> None:
        """Assert that every block is accounted for and owned by running sequences alone. For tests."""
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence owns blocks"
        self._cache.check([sequence.block_table for sequence in self.running])

    def _preempt(self, sequence: Sequence) -> None:
        self._requeue(sequence)
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Give up a running sequence's blocks and let it start over, its sampled tokens kept."""
        self.running.remove(sequence)
        self._detach(sequence)
        self.waiting.appendleft(sequence)

    def _detach(self, sequence: Sequence) -> None:
        self._cache.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
