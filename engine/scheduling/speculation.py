"""Which of the sequences that run carry guesses into the next step. Policy only: no torch."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from ..speculative.ngram import NgramDrafter
from ..speculative.pace import Pace
from ..speculative.speculative_config import SpeculativeConfig
from .sequence import Sequence

Draft = tuple[int, ...]


class Drafter(Protocol):
    """Whoever guesses. `longest`: how long a sequence may become by guesses, if that is limited."""

    longest: int | None

    def drafts(self, wanted: Mapping[Sequence, int], budget: int) -> dict[Sequence, Draft]:
        """What may follow each sequence, of those of which something is known: so many tokens at most.

        Where a model says them these are placeholders, and `budget` is how many tokens that may compute.
        """

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """So many guesses were right, which the sequence is about to get."""


class LookingUp:
    """Guesses by what the sequences have said before."""

    longest: int | None = None

    def __init__(self, config: SpeculativeConfig) -> None:
        self._ngrams = NgramDrafter(config)

    def drafts(self, wanted: Mapping[Sequence, int], budget: int) -> dict[Sequence, Draft]:
        drafts = {sequence: self._ngrams.draft(sequence.token_ids, number) for sequence, number in wanted.items()}
        return {sequence: draft for sequence, draft in drafts.items() if draft}

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Nothing is kept of them."""


class Speculation:
    """Guesses what sequences are going to say, and counts how much of it they say."""

    def __init__(self, config: SpeculativeConfig, drafter: Drafter | None = None) -> None:
        self._config = config
        self._drafter = drafter or LookingUp(config)
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def may_follow(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the step after the one launched now may carry guesses, which depend on what this one brings."""
        return len(running) <= self._config.disable_by_batch_size and any(map(self._may_guess_next, running))

    def drafts(self, running: SequenceOf[Sequence], budget: int) -> dict[Sequence, Draft]:
        """Guesses for those that decode; none where a step of at most `budget` tokens may lack room for all."""
        is_on = len(running) <= self._config.disable_by_batch_size
        if not is_on or len(running) * (1 + self._config.num_speculative_tokens) > budget:
            return {}
        numbers = {sequence: self._number(sequence) for sequence in running if _decodes(sequence)}
        wanted = {sequence: number for sequence, number in numbers.items() if number > 0}
        return self._drafter.drafts(wanted, budget) if wanted else {}

    def verified(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note how many of a sequence's guesses were right, before it has the tokens."""
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        assert sequence.pace is not None
        sequence.pace.verified(len(sequence.token_ids), num_draft_tokens, num_accepted)
        self._drafter.verified(sequence, num_accepted)

    def _number(self, sequence: Sequence) -> int:
        """How many tokens to guess; none where it is not above 0."""
        if sequence.pace is None:
            sequence.pace = Pace(self._config.num_speculative_tokens)
        num_known = len(sequence.token_ids)
        return min(sequence.pace.number(num_known), self._longest(sequence) - num_known)

    def _may_guess_next(self, sequence: Sequence) -> bool:
        num_then = sequence.num_tokens + 1
        return num_then < self._longest(sequence) and (sequence.pace is None or sequence.pace.number(num_then) > 0)

    def _longest(self, sequence: Sequence) -> int:
        longest = self._drafter.longest
        return sequence.speculates_up_to if longest is None else min(sequence.speculates_up_to, longest)


def _decodes(sequence: Sequence) -> bool:
    """Whether its last token is all that it has to compute, and is of its answer."""
    num_known = len(sequence.token_ids)
    return num_known > sequence.num_prompt_tokens and sequence.num_computed_tokens == num_known - 1
