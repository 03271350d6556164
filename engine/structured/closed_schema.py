"""JSON schemas whose objects have the properties that they name, and no others. Free of torch."""

from collections.abc import Mapping
from typing import Any

# Parts that are schemas, lists of them, or have them by name.
_PARTS = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# These say what else may be in an object.
_OPENING = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")
# Of parts that are to hold together each would exclude the others' properties.
_JOINING = ("not", "if", "dependencies", "dependentSchemas", "unevaluatedProperties")
_BESIDE = ("$ref", "anyOf", "oneOf", "allOf")


def closed(schema: Any) -> Any:
    """The schema for a model that is to answer: it would go on inventing properties, as JSON Schema lets it.

    What follows this follows the schema that was given too. An object that says what else it may have is left as it is,
    as is a schema whose parts are to hold together.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if any(name in schema for name in _JOINING) or len(_list(schema.get("allOf"))) > 1:
        return True
    if "properties" in schema and any(name in schema for name in _BESIDE):
        return True
    named = (each for name in _NAMED for each in _mapping(schema.get(name)).values())
    listed = (each for name in _LISTS for each in _list(schema.get(name)))
    return any(map(_joins, (*named, *listed, *(schema.get(name) for name in _PARTS))))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    whole = dict(schema)
    for name in _PARTS:
        if name in schema:
            whole[name] = _closed(schema[name])
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            whole[name] = [_closed(each) for each in parts]
    for name in _NAMED:
        if isinstance(named := schema.get(name), Mapping):
            whole[name] = {key: _closed(each) for key, each in named.items()}
    if _names_all(schema):
        whole["additionalProperties"] = False
    return whole


def _names_all(schema: Mapping[str, Any]) -> bool:
    names = list(_mapping(schema.get("properties")))
    is_open = any(name in schema for name in _OPENING)
    return bool(names) and not is_open and all(each in names for each in _list(schema.get("required")))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
