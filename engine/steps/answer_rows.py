"""The answers that a batch goes on with, as columns that are kept from step to step."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat

from ..request import RequestEvent
from ..serving.served_request import ServedRequest


class AnswerRows:
    """Says what a token each means for all answers at once, but for those that need a closer look.

    Told of every step's tokens, once each.
    """

    def __init__(self, requests: Sequence[ServedRequest]) -> None:
        self._told = [row for row, each in enumerate(requests) if each.tells_each_step]
        told = [requests[row] for row in self._told]
        self._request_ids = [each.request.request_id for each in told]
        self._num_cached_tokens = [each.sequences[0].num_cached_tokens for each in told]
        self._num_read = 0
        # The rows that reach their longest with the step of this number.
        self._longest_at: dict[int, list[int]] = defaultdict(list)
        for row, each in enumerate(requests):
            self._longest_at[each.max_tokens - each.sequences[0].num_output_tokens].append(row)
        self._stop_token_ids = frozenset[int]().union(*{each.stop_token_ids for each in requests})
        self._checked = [row for row, each in enumerate(requests) if each.is_checked]

    @cached_property
    def places(self) -> dict[int, int]:
        """Of the rows that are told of each step, their places among `events`."""
        return {row: place for place, row in enumerate(self._told)}

    def events(self, tokens: Sequence[int]) -> list[RequestEvent]:
        """What a step brought to those that are told of each; it has no more to tell than their tokens."""
        if not self._told:
            return []
        if len(self._told) < len(tokens):
            tokens = [tokens[row] for row in self._told]
        columns = (self._request_ids, zip(tokens, strict=True), repeat(None), self._num_cached_tokens)
        unset = (repeat(None), repeat(None), repeat(()), repeat(None), repeat(None))
        # As the class itself does, without looking at names and defaults.
        return list(map(tuple.__new__, repeat(RequestEvent), zip(*columns, *unset, strict=False)))

    def ending(self, tokens: Sequence[int]) -> list[int]:
        """The rows that may end with this step's tokens, or have more to tell; counts the step."""
        self._num_read += 1
        rows = {*self._checked, *self._longest_at.get(self._num_read, ())}
        if self._stop_token_ids and not self._stop_token_ids.isdisjoint(tokens):
            rows.update(row for row, token in enumerate(tokens) if token in self._stop_token_ids)
        return sorted(rows)
