"""What is not the same in two answers to one row, and where it begins."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

# In the order in which one explains the next: another prompt, then another text.
_EXACT = (
    "prompt_tokens",
    "error",
    "reasoning",
    "label",
    "output",
    "outputs",
    "votes",
    "finish_reason",
    "finish_reasons",
    "completion_tokens",
)
_PROBABLE = ("confidence", "probabilities", "logprobs", "outputs_logprobs", "prompt_logprobs")
_LOGPROB = "logprob"
_BEFORE, _AFTER = 20, 40


@dataclass(frozen=True)
class Difference:
    """Where a row that was made again first differs. `place`: the column, and where in it.

    `at`: from which character on, counted from 0, of two texts. `stored` and `again`: what is there.
    """

    row: int
    custom_id: str
    place: str
    at: int | None
    stored: Any
    again: Any

    def __str__(self) -> str:
        begin = "" if self.at is None else f" from character {self.at} on"
        values = (f"{_shown(value, self.at)} {when}" for value, when in ((self.stored, "before"), (self.again, "now")))
        return f"row {self.row} (custom_id {self.custom_id!r}): {self.place} differs{begin}: {', '.join(values)}"


def first_difference(stored: Mapping[str, Any], again: Mapping[str, Any], tolerance: float) -> Difference | None:
    """Compare two rows of data sets; probabilities, of tokens too, may differ by `tolerance`."""
    for name in (*_EXACT, *_PROBABLE):
        for place, *values in _differing(name, stored.get(name), again.get(name), tolerance):
            at = _first_differing(*values) if all(isinstance(value, str) for value in values) else None
            return Difference(stored["row"], stored["custom_id"], place, at, *values)
    return None


def _differing(place: str, one: Any, other: Any, tolerance: float) -> Iterator[tuple[str, Any, Any]]:
    """The places within two values at which they differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys((*one, *other)):
            yield from _differing(f"{place}.{name}", one.get(name), other.get(name), tolerance)
    elif isinstance(one, list) and isinstance(other, list):
        for index, (each, its_other) in enumerate(zip_longest(one, other)):
            yield from _differing(f"{place}[{index}]", each, its_other, tolerance)
    elif isinstance(one, float) and isinstance(other, float):
        if not abs(_probability(place, one) - _probability(place, other)) <= tolerance:
            yield place, one, other
    elif one != other:
        yield place, one, other


def _probability(place: str, value: float) -> float:
    return math.exp(value) if place.endswith(f".{_LOGPROB}") else value


def _first_differing(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(other)))


def _shown(value: Any, at: int | None) -> str:
    if not isinstance(value, str) or at is None:
        return repr(value)
    start, end = max(0, at - _BEFORE), at + _AFTER
    return f"{'…' if start else ''}{value[start:end]!r}{'…' if end < len(value) else ''}"
