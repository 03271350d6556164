"""Where an answer stands in its grammar, and which tokens it may go on with. Free of torch."""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from ..errors import EngineError
from .grammar import Grammar, reason_of

_INT32_BITS = 32


class GrammarError(EngineError):
    """A grammar that an answer cannot follow any further: it is too complex here, or leaves nothing to say."""


class Guide:
    """One answer's place in a grammar. Used by one thread.

    `end_token_ids`: these are allowed where the grammar is complete, and only there. `vocab_size`: the model's.
    """

    __slots__ = (
        "_end_token_ids",
        "_grammar",
        "_is_fresh",
        "_matcher",
        "_scratch",
        "_start",
        "_token_ids",
        "_vocab_size",
        "_words",
    )

    def __init__(self, grammar: Grammar, end_token_ids: Sequence[int], vocab_size: int) -> None:
        self._grammar = grammar
        self._start = grammar.start
        self._matcher = self._start.deep_copy()
        self._token_ids: list[int] = []
        self._end_token_ids = tuple(token for token in end_token_ids if token < vocab_size)
        self._vocab_size = vocab_size
        # llguidance's mask has a bit for each of the tokenizer's tokens and one for the grammar's end.
        self._scratch = numpy.zeros(_num_words(grammar.tokenizer_size + 1), dtype=numpy.int32)
        self._words = bit_words(vocab_size)
        self._is_fresh = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Take the answer's next token, no end token. Raises `GrammarError` when the grammar does not allow it."""
        self._is_fresh = False
        if not self._matcher.consume_token(token_id):
            self._renew()
            if not self._matcher.consume_token(token_id):
                raise GrammarError(f"token {token_id} does not fit structured_outputs: {reason_of(self._matcher)}")
        self._token_ids.append(token_id)

    @property
    def mask(self) -> NDArray[numpy.int32]:
        """The allowed tokens, a bit each: [ceil(vocab_size / 32)], for `apply_bit_mask`. Not to be kept.

        Computed once a token. Raises `GrammarError` when no token is allowed.
        """
        self.refresh()
        return self._words

    def refresh(self) -> None:
        """Compute the mask now, so that it is there when it is wanted."""
        if not self._is_fresh:
            self._compute()
            self._is_fresh = True

    def allows_other_than(self, token_ids: Sequence[int]) -> bool:
        """Whether a token is allowed that is none of these."""
        words = self.mask.copy()
        for token in token_ids:
            set_bit(words, token, False)
        return bool(words.any())

    def _compute(self) -> None:
        scratch, words = self._scratch, self._words
        self._matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        if self._matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
            if self._matcher.is_error():
                raise GrammarError(f"structured_outputs allow no next token: {reason_of(self._matcher)}")
        end = self._grammar.tokenizer_size
        may_end = _bit(scratch, end)
        set_bit(scratch, end, False)
        length = min(len(words), len(scratch))
        words[:length] = scratch[:length]
        if rest := self._vocab_size % _INT32_BITS:
            words[-1] &= (1 << rest) - 1
        # A tokenizer may take its end token for a text like any other.
        for token in self._end_token_ids:
            set_bit(words, token, may_end)
        if not words.any():
            raise GrammarError("structured_outputs allow no next token that the model's vocabulary has")

    def _renew(self) -> None:
        """Get to the same place from a start whose lexer is not used up."""
        self._start = self._grammar.renewed(self._start)
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._token_ids)


def bit_words(num_bits: int) -> NDArray[numpy.int32]:
    """So many bits, all of them 0."""
    return numpy.zeros(_num_words(num_bits), dtype=numpy.int32)


def _num_words(num_bits: int) -> int:
    return -(-num_bits // _INT32_BITS)


def _bit(words: NDArray[numpy.int32], index: int) -> bool:
    return bool(int(words[index // _INT32_BITS]) >> (index % _INT32_BITS) & 1)


def set_bit(words: NDArray[numpy.int32], index: int, value: bool) -> None:
    bits = words.view(numpy.uint32)
    flag = numpy.uint32(1 << (index % _INT32_BITS))
    bits[index // _INT32_BITS] = bits[index // _INT32_BITS] | flag if value else bits[index // _INT32_BITS] & ~flag
