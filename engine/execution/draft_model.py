"""A second, smaller model that says what the first one may say next."""

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy

from ...kernels.sampling import Likeliest, likeliest_tokens
from ..scheduling.model_drafter import DraftWork, ModelDrafter
from ..scheduling.scheduled_sequence import ScheduledSequence
from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from ..transfer import Readback
from .batch import Batch, SampledTokens
from .runner import Runner

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Guessing:
    """A sequence as the second model computes it, which gets its guesses on the device: `num_guesses` in all.

    `end`: how many of its tokens are computed before the first one. `is_broken`: logits were not finite.
    """

    sequence: Sequence
    end: int
    num_guesses: int
    guesses: list[int] = field(default_factory=list)
    is_broken: bool = False

    @classmethod
    def of(cls, work: DraftWork) -> Self:
        original = work.sequence
        sequence = Sequence(
            request_id=original.request_id,
            token_ids=original.token_ids,
            num_prompt_tokens=original.num_prompt_tokens,
            block_size=original.block_size,
            num_computed_tokens=work.start,
            block_table=original.block_table,
        )
        return cls(sequence, work.end, work.num_guesses)


class _Told(NamedTuple):
    """What of each of the rows is likeliest, on the device."""

    rows: list[_Guessing]
    likeliest: Likeliest


class DraftModel:
    """See `Proposer`. Guesses greedily, in the blocks of the sequences that it guesses for."""

    def __init__(self, runner: Runner, longest: int, vocab_size: int, block_size: int) -> None:
        """`longest`: the tokens that the second model has positions for. `vocab_size`: the first one's."""
        self.drafter = ModelDrafter(longest)
        self.block_bytes = runner.memory.block_bytes
        self._runner = runner
        self._vocab_size = vocab_size
        self._block_size = block_size

    def fill(self, plan: StepPlan) -> None:
        """Guess what a plan has placeholders for, and catch up with a sequence that lags.

        Waits for the guesses. What raises here has not changed the plan; its sequences guess no more.
        """
        work = self.drafter.begin(plan)
        if not work:
            return
        rows = [_Guessing.of(each) for each in work]
        try:
            self._guess(rows)
        except BaseException as error:
            self.drafter.give_up(work)
            # Without a guess the step is as good as any.
            if plan.num_draft_tokens or not isinstance(error, Exception):
                raise
            logger.warning("a sequence goes on without guesses: the draft model failed", exc_info=error)
            return
        plan.put_guesses(row.guesses for row in rows)
        if broken := [each for each, row in zip(work, rows, strict=True) if row.is_broken]:
            self._clean(broken)

    def computed(self, ended: SequenceOf[Sequence]) -> None:
        """It goes by the tokens alone."""

    def _guess(self, rows: SequenceOf[_Guessing]) -> None:
        """Compute what is known, then one guess after the other of those that are to have one."""
        known = [
            ScheduledSequence(row.sequence, row.end - row.sequence.num_computed_tokens, row.num_guesses > 0)
            for row in rows
        ]
        likeliest = self._likeliest(Batch.build(known, self._block_size, self._runner.device))
        for row in rows:
            row.sequence.num_computed_tokens = row.end
        told = [_Told([row for row in rows if row.num_guesses], likeliest)]
        while going := [row for row in told[-1].rows if row.num_guesses > len(told)]:
            likeliest = self._likeliest(self._next_batch(going, told[-1]))
            for row in going:
                row.sequence.num_computed_tokens += 1
            told.append(_Told(going, likeliest))
        _read(told)

    def _next_batch(self, going: SequenceOf[_Guessing], told: _Told) -> Batch:
        """A batch of those that go on with what they were told last."""
        rows = {row.sequence: index for index, row in enumerate(told.rows)}
        scheduled = [ScheduledSequence(row.sequence, 1, reaches_end=True) for row in going]
        sampled = SampledTokens(told.likeliest.tokens, rows)
        return Batch.build(scheduled, self._block_size, self._runner.device, sampled)

    def _likeliest(self, batch: Batch) -> Likeliest:
        # Vocabularies may be padded to different sizes, and a prompt may have tokens of the larger one's padding.
        if self._runner.vocab_size < self._vocab_size:
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._runner.vocab_size - 1))
        logits = self._runner.execute(batch)
        if logits.shape[1] > self._vocab_size:
            logits = logits[:, : self._vocab_size].contiguous()
        return likeliest_tokens(logits)

    def _clean(self, broken: list[DraftWork]) -> None:
        """NaNs in their blocks would be seen by whoever has those next: a mask lets them through as 0 × NaN."""
        self.drafter.give_up(broken)
        self._runner.memory.zero(sorted({block for each in broken for block in each.sequence.block_table}))


def _read(told: SequenceOf[_Told]) -> None:
    """Wait for the guesses, and tell the rows."""
    values = Readback([each for _, likeliest in told for each in (likeliest.tokens, likeliest.logits)]).wait()
    for (rows, _), tokens, logits in zip(told, values[::2], values[1::2], strict=True):
        for row, token, is_finite in zip(rows, tokens.tolist(), numpy.isfinite(logits), strict=True):
            row.guesses.append(token)
            row.is_broken |= not is_finite
