"""What the engine needs of a model that guesses."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from ..scheduling.sequence import Sequence
from ..scheduling.speculation import Drafter
from ..scheduling.step_plan import StepPlan


class Proposer(Protocol):
    """`drafter`: says before a step what is going to be guessed. `block_bytes`: what it keeps for each KV block."""

    block_bytes: int

    @property
    def drafter(self) -> Drafter: ...

    def fill(self, plan: StepPlan) -> None:
        """Guess what a plan has placeholders for, before anything of the plan is computed; waits for the guesses.

        What raises here has not changed the plan.
        """

    def computed(self, ended: SequenceOf[Sequence]) -> None:
        """A step is launched, which guesses may follow, and whose rows of logits are these sequences'."""
