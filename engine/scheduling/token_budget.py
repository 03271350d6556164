"""How many tokens a step may compute: less for a while after the device ran out of memory."""

# Steps without trouble before the budget is doubled again. A device short of memory fails each attempt at a larger
# budget, which costs a step: with 32 that is a few per cent.
_STEPS_BEFORE_GROWTH = 32


class TokenBudget:
    """`tokens`: the most a step may compute now, at most `full`."""

    def __init__(self, full: int) -> None:
        self.full = full
        self.tokens = full
        self._num_good_steps = 0

    def shrink(self, num_tried: int) -> bool:
        """Allow half of the tokens that were too many; false when one token was."""
        if num_tried <= 1:
            return False
        self.tokens = num_tried // 2
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
