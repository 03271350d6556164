"""Which guesses were right: those that are what was drawn, up to the first that is not."""

from collections import defaultdict
from collections.abc import Container, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from .step_result import StepResult


class Verdict(NamedTuple):
    """Of so many guesses so many were right. `is_broken`: the logits after one were not finite."""

    num_draft_tokens: int
    num_accepted: int
    is_broken: bool


class _Drawn(NamedTuple):
    row: int
    token: int


def verify(plan: StepPlan, result: StepResult) -> tuple[StepResult, Mapping[Sequence, Verdict]]:
    """The result without what was computed after a wrong guess, and what became of each sequence's draft.

    A token is a function of its logits, seed and position. So what is drawn after right guesses is what would have been
    drawn without them, and what is drawn after the first wrong one is nobody's. Nor is anything where all is broken: a
    guess that is a NaN reaches back to the token before it.
    """
    drawn: dict[Sequence, list[_Drawn]] = defaultdict(list)
    for sampled, token in zip(result.batch.sampled, result.tokens, strict=True):
        drawn[sampled.sequence].append(_Drawn(sampled.row, token))
    rejected: set[int] = set()
    verdicts = {}
    for item in plan.scheduled:
        if item.draft:
            rows = drawn[item.sequence]
            num_right = _num_right(item.draft, rows, result.broken_rows)
            is_first_broken = rows[0].row in result.broken_rows
            void = {each.row for each in (rows if is_first_broken else rows[num_right + 1 :])}
            verdicts[item.sequence] = Verdict(len(item.draft), num_right, not void.isdisjoint(result.broken_rows))
            rejected |= void
    return replace(result, rejected_rows=frozenset(rejected)), verdicts


def _num_right(draft: SequenceOf[int], drawn: SequenceOf[_Drawn], broken_rows: Container[int]) -> int:
    """How many guesses were drawn as well. One after which the logits are broken counts for none.

    Its sequence is to compute it once more, as any other token, and fails by that.
    """
    for index, guess in enumerate(draft):
        if guess != drawn[index].token or drawn[index].row in broken_rows or drawn[index + 1].row in broken_rows:
            return index
    return len(draft)
