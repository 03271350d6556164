"""Numbers in JSON schemas: which of them the compiler can hold an answer to. Free of torch.

llguidance 1.9 compares numbers as doubles, ends the process on a range of integers at the least of 64 bits, and takes
time by what an answer is to be a multiple of.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

# Beyond these a double no longer tells neighbouring integers apart.
_EXACT = 2**53
# Ranges may end here; those that end at 64 bits cannot be compiled.
_LAST = 9 * 10**18
# About a second to compile.
_MOST_MULTIPLES = 100_000
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_VALUES = ("const", "enum")
# Beside these what several parts say of one number is taken together.
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")


def number_problem(schema: Any) -> str | None:
    """Why answers cannot be held to a schema's numbers, naming the first one; None if they can."""
    multiples: list[int] = []
    is_joined = False
    for name, value in _keywords(schema):
        is_joined |= name in _JOINING
        if name in _VALUES and (rounded := _rounded(value)) is not None:
            return f"{name} has {rounded}, and numbers beyond 2**53 are not told from their neighbours: use a text"
        if _is_number(value) and ((name in _LOWER and value > _LAST) or (name in _UPPER and value < -_LAST)):
            return f"{name} is {value}, beyond the integers of 64 bits: leave it out, or use a text"
        if name == "multipleOf" and _is_number(value) and math.isfinite(value):
            multiples.append(_digits(value))
    if max(sum(multiples), math.lcm(*multiples) if is_joined else 0) > _MOST_MULTIPLES:
        return f"multipleOf, without zeros and all taken together, is above {_MOST_MULTIPLES}: take a rounder number"
    return None


def within_range(schema: Any) -> Any:
    """The schema with the bounds of integers where they can be compiled; those of 64 bits are common."""
    if isinstance(schema, list):
        return [within_range(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    whole = {name: value if name in _VALUES else within_range(value) for name, value in schema.items()}
    if "integer" in _types(schema) and "number" not in _types(schema):
        for name in (*_LOWER, *_UPPER):
            if _is_number(value := whole.get(name)) and abs(value) > _LAST:
                whole[name] = _LAST if value > 0 else -_LAST
    return whole


def _types(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type")
    return kind if isinstance(kind, list) else [kind]


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every name in every object, at whatever place: parts may be referred to wherever they stand."""
    level = [schema]
    while level:
        objects = [each for each in level if isinstance(each, Mapping)]
        for each in objects:
            yield from each.items()
        inner = [part for each in objects for part in each.values()]
        level = inner + [part for each in level if isinstance(each, list | tuple) for part in each]


def _rounded(value: Any) -> int | float | None:
    """The first whole number in a value that a double does not tell from others."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _rounded(each)) is not None), None)
    return value if _is_number(value) and abs(value) > _EXACT and value == value // 1 else None


def _digits(multiple: float) -> int:
    """Without the point and the zeros at its ends."""
    return int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)))


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
