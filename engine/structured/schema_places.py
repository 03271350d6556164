"""Where a JSON schema has a keyword. Free of torch."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

# What they hold are values, or texts.
_VALUES = ("const", "enum", "default", "examples")
# Their names are those of properties and of schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def first_place(schema: Any, keywords: Collection[str]) -> str | None:
    """The first part that has one of these keywords, as its names with dots; empty if it is the whole."""
    place = next(_places(schema, keywords, ()), None)
    return None if place is None else ".".join(place)


def _places(schema: Any, keywords: Collection[str], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from _places(each, keywords, (*place, str(number)))
    if not isinstance(schema, Mapping):
        return
    if any(name in schema for name in keywords):
        yield place
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            for key, each in value.items():
                yield from _places(each, keywords, (*place, name, key))
        elif name not in _VALUES:
            yield from _places(value, keywords, (*place, name))
