"""Objects have the properties that their schema names, unless it says otherwise."""

from typing import Any

import pytest

from headrace.engine.structured.closed_schema import closed

TEXT = {"type": "string"}
OPEN = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    "place",
    [
        lambda part: part,
        lambda part: {"type": "array", "items": part},
        lambda part: {"type": "array", "prefixItems": [part, TEXT]},
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"oneOf": [TEXT, part]},
        lambda part: {"allOf": [part]},
        lambda part: {"$ref": "#/$defs/A", "$defs": {"A": part}},
        lambda part: {"type": "object", "additionalProperties": part},
        lambda part: {"type": "object", "patternProperties": {"^x": part}},
        # Names of properties, not of parts.
        lambda part: {"properties": {"properties": part, "items": TEXT, "not": part}, "additionalProperties": False},
    ],
)
def test_objects_are_closed_wherever_they_stand(place):
    given = place(OPEN)
    assert closed(given) == place(CLOSED)
    assert given == place(OPEN)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        TEXT,
        {"type": "object"},
        {"type": "object", "properties": {}},
        CLOSED,
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": TEXT},
        {**OPEN, "patternProperties": {"^x": TEXT}},
        {**OPEN, "propertyNames": {"pattern": "^[a-z]$"}},
        {**OPEN, "minProperties": 3},
        {**OPEN, "required": ["a", "b"]},
        {**OPEN, "required": [{}]},
        {**OPEN, "anyOf": [{"required": ["b"]}]},
        {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": OPEN}},
        {"allOf": [OPEN, {"properties": {"b": TEXT}}]},
        {"$defs": {"A": OPEN}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]},
        {"type": "array", "items": {"not": OPEN}},
        {"if": OPEN, "then": OPEN},
        {"enum": [OPEN], "default": OPEN},
    ],
    ids=str,
)
def test_what_says_otherwise_or_is_to_hold_together_is_left_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
