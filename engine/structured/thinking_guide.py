"""Where an answer stands that begins with thinking, and which tokens it may go on with. Free of torch."""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from .guide import GrammarError, Guide, bit_words, set_bit
from .reasoning import ReasoningTokens, ThinkingStage


class ThinkingGuide:
    """As a `Guide`, which is followed once the thinking is over. Used by one thread.

    `budget`: the thinking ends after so many tokens, if it has not before. `is_held`: the answer is held to choices or
    to `answer`, so that it is not to end while the model thinks, and begins after the break. A prompt that has not
    begun the thinking is made to.
    """

    __slots__ = ("_due", "_end_token_ids", "_is_held", "_is_thinking", "_left", "_tokens", "_words", "answer")

    def __init__(
        self,
        tokens: ReasoningTokens,
        prompt_token_ids: Sequence[int],
        budget: int | None,
        is_held: bool,
        answer: Guide | None,
        end_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.answer = answer
        self._tokens = tokens
        self._is_held = is_held
        self._end_token_ids = tuple(token for token in end_token_ids if token < vocab_size)
        self._left = budget
        self._is_thinking = True
        # What comes next, whatever the model would say.
        self._due: list[int] = []
        if tokens.stage(prompt_token_ids) is ThinkingStage.NOT_BEGUN:
            self._due.extend(tokens.opening)
        self._end_if_spent()
        self._words = bit_words(vocab_size)

    @property
    def is_over(self) -> bool:
        """Whether the answer comes next."""
        return not self._is_thinking and not self._due

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return self.is_over and self.answer is not None and self.answer.is_complete

    def advance(self, token_id: int) -> None:
        """Take the next token, no end token. Raises `GrammarError` when that may not come here."""
        if self._due:
            self._take_due(token_id)
        elif not self._is_thinking:
            if self.answer is not None:
                self.answer.advance(token_id)
        elif token_id == self._tokens.end_token_id:
            self._end()
        elif self._left is not None:
            self._left -= 1
            self._end_if_spent()

    def _take_due(self, token_id: int) -> None:
        if token_id != (due := self._due.pop(0)):
            raise GrammarError(f"token {token_id} came where the thinking goes on with token {due}")
        if self._is_thinking and token_id == self._tokens.end_token_id:
            self._end()

    def _end(self) -> None:
        self._is_thinking = False
        # Of some formats that was its beginning.
        self._due.extend(self._tokens.closing[1:])
        if self._is_held:
            self._due.extend(self._tokens.break_token_ids)

    def _end_if_spent(self) -> None:
        if self._left is not None and self._left <= 0:
            self._due.append(self._tokens.end_token_id)

    @property
    def mask(self) -> NDArray[numpy.int32]:
        """As that of a `Guide`."""
        if self.is_over and self.answer is not None:
            return self.answer.mask
        if self._due:
            self._words.fill(0)
            set_bit(self._words, self._due[0], True)
            return self._words
        self._words.fill(-1)
        if self._is_thinking:
            for token in (*self._tokens.barred, *(self._end_token_ids if self._is_held else ())):
                set_bit(self._words, token, False)
        return self._words

    def refresh(self) -> None:
        """As that of a `Guide`."""
        if self.is_over and self.answer is not None:
            self.answer.refresh()

    def allows_other_than(self, token_ids: Sequence[int]) -> bool:
        """As that of a `Guide`."""
        if self._due:
            return self._due[0] not in token_ids
        return self.answer is None or self._is_thinking or self.answer.allows_other_than(token_ids)


AnyGuide = Guide | ThinkingGuide
