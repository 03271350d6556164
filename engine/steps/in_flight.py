"""A step that is launched and not yet read: on a GPU the device may still be at it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..execution.batch import SampledTokens
from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from .step_result import LaunchedResult, StepResult


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """`result`: None where nothing was to be computed. `sampled`: the tokens that the next step goes on by, if it may
    be launched before this one is read.
    """

    plan: StepPlan
    result: LaunchedResult | None
    sampled: SampledTokens | None = None

    @property
    def unread(self) -> Mapping[Sequence, int] | None:
        """The sequences whose sampled tokens are counted as theirs already; None where no step may go on by them."""
        return self.sampled.rows if self.sampled is not None else None

    @classmethod
    def of(cls, plan: StepPlan, result: LaunchedResult, may_be_followed: bool) -> "StepInFlight":
        rows = result.batch.next_rows() if may_be_followed else None
        return cls(plan, result, None if rows is None else SampledTokens(result.tokens, rows))

    def read(self) -> StepResult | None:
        """Wait for the device; None where nothing was to be computed. Changes nothing."""
        return self.result.read() if self.result is not None else None
