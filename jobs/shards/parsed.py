"""Answers that follow a JSON schema as values with types, which data tools read without parsing JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ..spec.json_values import referred
from ..spec.schemas import JobSpec

# Of the data set.
_SINCE_VERSION = 3
# A schema may name its parts over and over.
_MOST_PARTS = 2000
_INT64 = range(-(2**63), 2**63)
# What has no type of its own: a text as it is, anything else as JSON.
_ANY = pa.string()
_SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


def parsed_type(spec: JobSpec) -> pa.DataType | None:
    """That of a job's answers; None where they are no JSON, or JSON of which nothing is known.

    Objects are structs of their properties, arrays lists. Where a part may be of several types, is an object of any
    names or contains itself, it is text.
    """
    structure = None if spec.samples_each_row else spec.sampling.structure
    if spec.schema_version < _SINCE_VERSION or structure is None or structure.json is None:
        return None
    schema: Any = json.loads(structure.json) if isinstance(structure.json, str) else structure.json
    try:
        kind = _Types(schema).of(schema, ())
    except (_TooManyParts, RecursionError):
        return None
    return None if kind == _ANY and not _is_text(schema) else kind


def parsed_value(text: str | None, kind: pa.DataType) -> Any:
    """An answer for a column of this type; None of one that was cut off, and in place of what does not fit."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return _fitted(value, kind)


class _TooManyParts(Exception):
    pass


class _Types:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_parts = 0

    def of(self, schema: Any, within: tuple[str, ...]) -> pa.DataType:
        """`within`: the references that lead here."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise _TooManyParts
        if not isinstance(schema, Mapping):
            return _ANY
        if isinstance(name := schema.get("$ref"), str):
            return _ANY if name in within else self.of(referred(self._root, name), (*within, name))
        for several in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(several), list):
                return self._common(options, within)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return self._common([{"type": kind} for kind in {_kind(value) for value in values}], within)
        return self._typed(schema, within)

    def _common(self, options: Sequence[Any], within: tuple[str, ...]) -> pa.DataType:
        """The one type that all have which are not null."""
        kinds = {self.of(option, within) for option in options if not _is_null(option)}
        if kinds == {pa.int64(), pa.float64()}:
            return pa.float64()
        return kinds.pop() if len(kinds) == 1 else _ANY

    def _typed(self, schema: Mapping[str, Any], within: tuple[str, ...]) -> pa.DataType:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._common([{**schema, "type": each} for each in kind], within)
        if kind == "array" and isinstance(schema.get("items"), Mapping) and not schema.get("prefixItems"):
            return pa.list_(self.of(schema["items"], within))
        properties = schema.get("properties")
        if kind in ("object", None) and isinstance(properties, Mapping) and _can_be_fields(properties):
            return pa.struct([(name, self.of(each, within)) for name, each in properties.items()])
        return _SCALARS.get(str(kind), _ANY)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" or "enum" in schema or "const" in schema


def _kind(value: Any) -> str:
    """The type of a value, in the words of a schema."""
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number"}
    return names.get(type(value), "")


def _can_be_fields(properties: Mapping[str, Any]) -> bool:
    """SQL engines ignore the case of names, and Parquet knows no struct without any."""
    names = {name.casefold() for name in properties if name}
    return len(names) == len(properties) > 0


def _fitted(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if not isinstance(value, Mapping):
            return None
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_fitted(each, kind.value_type) for each in value] if isinstance(value, list) else None
    if kind == _ANY:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # JSON can write halves of characters.
        return text.encode(errors="replace").decode()
    if isinstance(value, bool) or kind == pa.bool_():
        return value if isinstance(value, bool) and kind == pa.bool_() else None
    return _number(value, kind)


def _number(value: Any, kind: pa.DataType) -> int | float | None:
    if not isinstance(value, int | float):
        return None
    if kind == pa.int64():
        is_whole = isinstance(value, int) or value.is_integer()
        return int(value) if is_whole and int(value) in _INT64 else None
    try:
        return float(value)
    except OverflowError:
        return None
