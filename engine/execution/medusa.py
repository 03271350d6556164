"""Heads on the model's own hidden states that say what follows the next token."""

from collections.abc import Sequence as SequenceOf

from ..models.medusa import MedusaHeads
from ..scheduling.head_drafter import HeadDrafter
from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from ..transfer import Readback, to_device
from .model_runner import ModelRunner


class Medusa:
    """See `Proposer`: a chain of the likeliest token of each head, no tree."""

    block_bytes = 0

    def __init__(self, heads: MedusaHeads, runner: ModelRunner) -> None:
        self.drafter = HeadDrafter(heads.config.num_heads)
        self._heads = heads
        self._runner = runner

    def fill(self, plan: StepPlan) -> None:
        guessed = [item for item in plan.scheduled if item.draft]
        if guessed:
            rows = [self.drafter.row(item.sequence) for item in guessed]
            plan.put_guesses(self._guess(rows, max(len(item.draft) for item in guessed)))
        # The runner is about to overwrite them.
        self.drafter.forget()

    def computed(self, ended: SequenceOf[Sequence]) -> None:
        self.drafter.computed(ended)

    def _guess(self, rows: SequenceOf[int], number: int) -> list[list[int]]:
        hidden = self._runner.kept_hidden(to_device(rows, self._heads.device))
        [guesses] = Readback([self._heads.guess(hidden, number)]).wait()
        drafts: list[list[int]] = guesses.tolist()
        return drafts
