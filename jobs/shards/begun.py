"""Answers that were begun, as they are kept: tokens of four bytes each, or with each its log-probabilities."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...engine.logprobs import Logprob, TokenLogprobs

# Of a token: four bytes, the lowest first on every machine that torch runs on.
_TOKEN = "I"
# A token is then one entry for itself, and one for each of the likeliest that are reported in its place.
_ENTRY = np.dtype([("token_id", "<u4"), ("rank", "<u4"), ("logprob", "<f8")])
# Where a token is among the likeliest itself, there is one entry less.
_NONE = 2**32 - 1


@dataclass(frozen=True)
class Begun:
    """An answer's first tokens. `logprobs`: one for each token where its request asks for them, else empty."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def starts_with(self, other: "Begun") -> bool:
        return self.token_ids[: len(other)] == other.token_ids

    def to_bytes(self, num_top: int | None) -> bytes:
        """`num_top`: what the request's `logprobs` says."""
        if num_top is None:
            return array(_TOKEN, self.token_ids).tobytes()
        entries = np.full((len(self), num_top + 1), _NONE, _ENTRY)
        for place, token, logprobs in zip(entries, self.token_ids, self.logprobs, strict=True):
            # The token's own comes first.
            ids = (token, *(each for each in logprobs if each != token))
            for index, each in enumerate(ids):
                place[index] = each, logprobs[each].rank, logprobs[each].logprob
        return entries.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, num_top: int | None) -> Self:
        """What `to_bytes` has made."""
        if num_top is None:
            return cls(tuple(array(_TOKEN, data)))
        places = np.frombuffer(data, _ENTRY).reshape(-1, num_top + 1).tolist()
        return cls(tuple(place[0][0] for place in places), tuple(map(_logprobs, places)))


def bytes_of_token(num_top: int | None) -> int:
    """How many bytes each token is kept in."""
    return array(_TOKEN).itemsize if num_top is None else _ENTRY.itemsize * (num_top + 1)


def _logprobs(place: Iterable[Sequence[float]]) -> TokenLogprobs:
    return {int(token): Logprob(logprob, int(rank)) for token, rank, logprob in place if token != _NONE}
