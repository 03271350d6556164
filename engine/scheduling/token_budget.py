"""How many tokens a step may compute: less for a while after the device ran out of memory, and beside the urgent."""

# Steps without trouble before the budget is doubled again. A device short of memory fails each attempt at a larger
# budget, which costs a step: with 32 that is a few per cent.
_STEPS_BEFORE_GROWTH = 32

# What others' prompts may add to each step of somebody more urgent: ten tokens a second are more than one reads.
_SECONDS_BESIDE_URGENT = 0.1
# A chunk that costs little more than a single token, as the weights are read anyway.
_LEAST_BESIDE_URGENT = 32


class TokenBudget:
    """`tokens`: the most a step may compute now, at most `full`.

    `beside_urgent`: of these the most that may be of prompts less urgent than somebody in the step; as many as `full`
    until it is known how fast prompts are computed.
    """

    def __init__(self, full: int) -> None:
        self.full = full
        self.tokens = full
        self.beside_urgent = full
        self._num_good_steps = 0
        self._tokens_per_second: float | None = None

    def shrink(self, num_tried: int) -> bool:
        """Allow half of the tokens that were too many; false when no fewer can be allowed."""
        # A step with an image that is not to be cut may have more than were allowed.
        num_allowed = min(num_tried, self.tokens)
        if num_allowed <= 1:
            return False
        self.tokens = num_allowed // 2
        self._num_good_steps = 0
        return True

    def step_succeeded(self) -> None:
        """Count a step towards the return to the full budget."""
        if self.tokens == self.full:
            return
        self._num_good_steps += 1
        if self._num_good_steps == _STEPS_BEFORE_GROWTH:
            self.tokens = min(self.full, 2 * self.tokens)
            self._num_good_steps = 0

    def took(self, seconds: float, num_tokens: int, num_sequences: int) -> None:
        """Learn from a step's time how many tokens of prompts fit beside the urgent.

        One in which most tokens are sequences' only ones says nothing of prompts.
        """
        if num_tokens < 2 * num_sequences or seconds <= 0:
            return
        speed = num_tokens / seconds
        # Half of what is known is of the last step: what else runs on the machine comes and goes.
        self._tokens_per_second = speed if self._tokens_per_second is None else (self._tokens_per_second + speed) / 2
        fitting = int(self._tokens_per_second * _SECONDS_BESIDE_URGENT)
        self.beside_urgent = min(self.full, max(_LEAST_BESIDE_URGENT, fitting))
