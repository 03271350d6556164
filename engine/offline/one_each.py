"""Arguments that are one for all prompts, or one each."""

from collections.abc import Sequence
from types import UnionType
from typing import Any

from ..errors import InvalidRequestError


def one_each(name: str, given: Any, kind: type | UnionType, called: str, number: int) -> Sequence[Any]:
    """The argument `name` of each of `number` prompts. `called`: what a thing of its `kind` is in errors.

    Raises `InvalidRequestError` where it is neither one nor as many.
    """
    if _is(given, kind):
        return [given] * number
    if not isinstance(given, Sequence) or not all(_is(each, kind) for each in given):
        raise InvalidRequestError(f"{name} must be {called}, or one for each prompt, not {given!r}", name)
    if len(given) != number:
        raise InvalidRequestError(f"{name}: {len(given)} for {number} prompts: give one, or one each", name)
    return given


def _is(given: Any, kind: type | UnionType) -> bool:
    # Python counts true and false among the numbers.
    return isinstance(given, kind) and not isinstance(given, bool)
