"""A step that is launched and not yet read: on a GPU the device may still be at it."""

from collections.abc import Mapping
from dataclasses import dataclass

from .batch import SampledTokens
from .sequence import Sequence
from .step_plan import StepPlan
from .step_result import LaunchedResult, SampledRow, StepResult


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """`result`: None where nothing was to be computed. `sampled`: the tokens that the next step goes on by, if it may
    be launched before this one is read.
    """

    plan: StepPlan
    result: LaunchedResult | None
    sampled: SampledTokens | None = None

    @property
    def unread(self) -> Mapping[Sequence, int]:
        """The sequences whose sampled tokens are counted as theirs already."""
        return self.sampled.rows if self.sampled is not None else {}

    def read(self) -> StepResult:
        """Wait for the device. Changes nothing."""
        return self.result.read() if self.result is not None else StepResult([], [], [])


def sampled_for_next(result: LaunchedResult) -> SampledTokens | None:
    """What the step after this one goes on by, without having read it; None where it depends on what is read.

    So it does where a choice is scored, where a prompt is shared with followers, and where a next token is masked,
    biased or penalised by what was said before.
    """
    if result.scored:
        return None
    rows: dict[Sequence, int] = {}
    for index, sampled in enumerate(result.sampled):
        if sampled.leader is not None:
            return None
        if _has_next(sampled):
            if sampled.live.adjustment is not None:
                return None
            rows[sampled.sequence] = index
    return SampledTokens(result.tokens, rows)


def _has_next(sampled: SampledRow) -> bool:
    """Whether the answer may go on after this token, as far as its length is concerned."""
    sequence = sampled.sequence
    return sequence.num_tokens - sequence.num_prompt_tokens + 1 < sampled.live.max_tokens
