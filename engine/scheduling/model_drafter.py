"""Whose guesses a second model has time for, and what it knows of each sequence. Policy only: no torch."""

from collections.abc import Mapping
from typing import NamedTuple

from ..kv_cache.block_hashes import BlockHash
from .sequence import Sequence
from .speculation import Draft
from .step_plan import StepPlan


class DraftWork(NamedTuple):
    """The tokens of `sequence` from `start` to `end`, which are known, are computed, then so many are guessed."""

    sequence: Sequence
    start: int
    end: int
    num_guesses: int


class ModelDrafter:
    """Has a second model catch up with the sequences that are to guess. `longest`: as in `Drafter`.

    Its KV lies in the same blocks as the first one's, in a memory of its own, and is computed when a guess is wanted:
    steps that guess nothing cost it nothing. A block's hash says which tokens are in it. So what was written there is
    known for what it is whoever owns the block by then, and nobody says when a block changes hands.
    """

    def __init__(self, longest: int) -> None:
        self.longest: int | None = longest
        # Of the last full block's tokens that was written there, by the block's number.
        self._hashes: dict[int, BlockHash] = {}
        # The first that there was no time for, and how much there was.
        self._lagging: tuple[Sequence, int] | None = None

    def drafts(self, wanted: Mapping[Sequence, int], budget: int) -> dict[Sequence, Draft]:
        """Placeholders for those that can be caught up with: whoever lacks the fewest tokens comes first."""
        self._lagging = None
        lacking = {sequence: len(sequence.token_ids) - self._first_missing(sequence) for sequence in wanted}
        drafts: dict[Sequence, Draft] = {}
        for sequence in sorted(lacking, key=lacking.__getitem__):
            if lacking[sequence] > budget:
                self._lagging = (sequence, budget)
                break
            budget -= lacking[sequence]
            drafts[sequence] = (0,) * wanted[sequence]
        return drafts

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        sequence.num_drafted_tokens = min(sequence.num_drafted_tokens, len(sequence.token_ids) + num_accepted)

    def begin(self, plan: StepPlan) -> list[DraftWork]:
        """What the second model is to compute for a step, all in one batch; it counts as computed from now on."""
        work = [self._begin(item.sequence, len(item.draft)) for item in plan.scheduled if item.draft]
        lagging, self._lagging = self._lagging, None
        # Its blocks may have been given up for the step.
        if lagging is not None and lagging[0].block_table:
            work.append(self._catch_up(*lagging))
        # There may have been no time for the one that lags at all.
        return [each for each in work if each.start < each.end]

    def give_up(self, work: list[DraftWork]) -> None:
        """It failed: these sequences do without guesses, and nothing of what is in their blocks is used."""
        for sequence, _, _, _ in work:
            sequence.speculates_up_to = 0
            for block in sequence.block_table:
                self._hashes.pop(block, None)

    def _begin(self, sequence: Sequence, num_guesses: int) -> DraftWork:
        start, end = self._first_missing(sequence), len(sequence.token_ids)
        self._written(sequence, start, end)
        # What follows the last guess is not asked: that is not computed.
        last = end + num_guesses - 1
        for block in sequence.block_table[end // sequence.block_size : -(-last // sequence.block_size)]:
            self._hashes.pop(block, None)
        sequence.num_drafted_tokens = last
        return DraftWork(sequence, start, end, num_guesses)

    def _catch_up(self, sequence: Sequence, budget: int) -> DraftWork:
        start = self._first_missing(sequence)
        end = max(start, min(start + budget, sequence.num_computed_tokens))
        self._written(sequence, start, end)
        sequence.num_drafted_tokens = end
        return DraftWork(sequence, start, end, 0)

    def _first_missing(self, sequence: Sequence) -> int:
        """The first token to compute: the last known one always is."""
        known = sequence.num_drafted_tokens or self._num_found(sequence)
        return min(known, len(sequence.token_ids) - 1)

    def _num_found(self, sequence: Sequence) -> int:
        """How many tokens' KV others have left in the blocks that the sequence begins with."""
        num_blocks = 0
        for block, block_hash in zip(sequence.block_table, sequence.hashes(), strict=False):
            if self._hashes.get(block) != block_hash:
                break
            num_blocks += 1
        return num_blocks * sequence.block_size

    def _written(self, sequence: Sequence, start: int, end: int) -> None:
        """Note which full blocks these tokens fill, and that what else was in them is gone."""
        size, hashes = sequence.block_size, sequence.hashes()
        for index in range(start // size, -(-end // size)):
            block = sequence.block_table[index]
            if (index + 1) * size <= end:
                self._hashes[block] = hashes[index]
            else:
                self._hashes.pop(block, None)
