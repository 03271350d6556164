"""Which of the sequences that run carry guesses into the next step. Policy only: no torch."""

from collections.abc import Sequence as SequenceOf

from ..speculative.ngram import NgramDrafter
from ..speculative.pace import Pace
from ..speculative.speculative_config import SpeculativeConfig
from .sequence import Sequence

Draft = tuple[int, ...]


class Speculation:
    """Guesses what sequences are going to say, and counts how much of it they say."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._drafter = NgramDrafter(config)
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def may_follow(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the step after the one launched now may carry guesses, which depend on what this one brings."""
        return len(running) <= self._config.disable_by_batch_size and any(map(_may_guess_next, running))

    def drafts(self, running: SequenceOf[Sequence], budget: int) -> dict[Sequence, Draft]:
        """Guesses for those that decode; none where a step of at most `budget` tokens may lack room for all."""
        is_on = len(running) <= self._config.disable_by_batch_size
        if not is_on or len(running) * (1 + self._config.num_speculative_tokens) > budget:
            return {}
        drafts = {sequence: self._draft(sequence) for sequence in running if _decodes(sequence)}
        return {sequence: draft for sequence, draft in drafts.items() if draft}

    def verified(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note how many of a sequence's guesses were right, before it has the tokens."""
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        assert sequence.pace is not None
        sequence.pace.verified(len(sequence.token_ids), num_draft_tokens, num_accepted)

    def _draft(self, sequence: Sequence) -> Draft:
        if sequence.pace is None:
            sequence.pace = Pace(self._config.num_speculative_tokens)
        num_known = len(sequence.token_ids)
        number = min(sequence.pace.number(num_known), sequence.speculates_up_to - num_known)
        return self._drafter.draft(sequence.token_ids, number) if number > 0 else ()


def _may_guess_next(sequence: Sequence) -> bool:
    num_then = sequence.num_tokens + 1
    return num_then < sequence.speculates_up_to and (sequence.pace is None or sequence.pace.number(num_then) > 0)


def _decodes(sequence: Sequence) -> bool:
    """Whether its last token is all that it has to compute, and is of its answer."""
    num_known = len(sequence.token_ids)
    return num_known > sequence.num_prompt_tokens and sequence.num_computed_tokens == num_known - 1
