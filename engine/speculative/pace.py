"""How far ahead a sequence guesses: the less, the more it was wrong."""

from dataclasses import dataclass, field

# Where nothing is ever right one token of so many carries a guess.
_LONGEST_PAUSE = 32


@dataclass(slots=True)
class Pace:
    """`longest`: the most tokens to guess.

    Right guesses double their number; of a draft that was wrong from some token on the next is one longer than what was
    right, and where nothing was it has to wait: 1 token, then 2, 4 and so on.
    """

    longest: int
    _number: int = field(init=False)
    _pause: int = 1
    # How many tokens the sequence has when it may guess again.
    _resumes_at: int = 0

    def __post_init__(self) -> None:
        self._number = self.longest

    def number(self, num_tokens: int) -> int:
        """How many tokens to guess after so many."""
        return self._number if num_tokens >= self._resumes_at else 0

    def verified(self, num_tokens: int, num_guessed: int, num_right: int) -> None:
        """Learn how many of the guesses after so many tokens were right."""
        if num_right == num_guessed:
            self._number = min(2 * self._number, self.longest)
        else:
            self._number = num_right + 1
        if num_right:
            self._pause = 1
        else:
            # The sequence has one more token by now.
            self._resumes_at = num_tokens + 1 + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
