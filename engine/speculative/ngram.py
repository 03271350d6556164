"""Guesses by looking up what was said before: the draft is what followed the last tokens where they were last."""

from array import array
from itertools import cycle, islice

import numpy

from .speculative_config import SpeculativeConfig


class NgramDrafter:
    """Looks for the longest of a sequence's last n-grams in the sequence itself; of several places takes the last."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._longest = config.prompt_lookup_max
        self._shortest = config.prompt_lookup_min

    def draft(self, token_ids: "array[int]", number: int) -> tuple[int, ...]:
        """What may follow `token_ids`: `number` tokens, or none.

        A text that repeats itself is taken to go on so, however short what it repeats.
        """
        following = self._following(token_ids)
        return tuple(islice(cycle(token_ids[following:]), number)) if following else ()

    def _following(self, token_ids: "array[int]") -> int:
        """The position after the place found; 0 where there is none."""
        # No copy. It is gone before the next token is appended.
        tokens = numpy.frombuffer(token_ids, dtype=numpy.int32)
        ends = numpy.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        found = 0
        for length in range(1, min(self._longest, len(tokens) - 1) + 1):
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-length]]
            if not len(ends):
                break
            if length >= self._shortest:
                found = int(ends[-1])
        return found
