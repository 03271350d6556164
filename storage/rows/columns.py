"""Columns of the input on their way to the output: their types, their names, and values that have no type."""

import json
import math
import re
import warnings
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

# What the output and the spool put beside the input's columns, from the first version of the output's on.
_FIRST_NAMES = frozenset(
    (
        "row",
        "custom_id",
        "output",
        "outputs",
        "label",
        "confidence",
        "probabilities",
        "logprobs",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "error",
        "plan_error",
        "prompt_token_ids",
        "row_sampling",
        "finish_reasons",
        "outputs_logprobs",
        "prompt_logprobs",
        "from_cache",
    )
)
# What later versions have beside that. A job's data set keeps the columns of the version that the job began with.
_SECOND_NAMES = _FIRST_NAMES | {"margin", "entropy", "votes", "agreement", "receipt"}
_THIRD_NAMES = _SECOND_NAMES | {"parsed"}
RESERVED_NAMES = _THIRD_NAMES | {"tool_calls"}
_RESERVED_BY_VERSION = {1: _FIRST_NAMES, 2: _SECOND_NAMES, 3: _THIRD_NAMES, 4: RESERVED_NAMES}
SCHEMA_VERSION = max(_RESERVED_BY_VERSION)
# What only a job with reasoning has beside that; its input may have no such columns.
REASONING_NAMES = ("reasoning", "reasoning_tokens")
# In front of a name of the input's that is one of these.
_PREFIX = "input_"
_ENCODING = b"headrace.encoding"
_JSON_TEXT = {_ENCODING: b"json"}
# Of a column of doubles: what is whole in it was written without a point.
_NUMBERS = {_ENCODING: b"number"}
# Beyond these a float64 no longer tells neighbouring integers apart, and an int64 overflows.
_FLOAT64_EXACT = 2**53
_INT64_MAX = 2**63 - 1


class SchemaUnifier:
    """Finds one type for each column of a whole input, row by row.

    Scalars of JSON become bool, int64, double or string; integers and floats together double. Lists,
    objects, and kinds that do not go together become JSON text. With `exact` types (Parquet) it has nothing
    to find.
    """

    def __init__(self, exact: pa.Schema | None = None) -> None:
        self._exact = exact
        self._kinds: dict[str, set[str]] = {}

    def observe(self, values: Mapping[str, Any]) -> int:
        """Take in a row's values; returns about how many characters they are."""
        num_characters = 0
        for name, value in values.items():
            num_characters += len(value) if isinstance(value, str) else _num_characters(value)
            if self._exact is not None:
                continue
            if (kinds := self._kinds.get(name)) is None:
                kinds = self._kinds[name] = set()
            if value is not None:
                kinds.add(_kind(value))
        return num_characters

    def schema(self) -> pa.Schema:
        """The columns seen so far in the order of their first appearance; all nullable."""
        if self._exact is not None:
            return pa.schema([field.with_nullable(True) for field in self._exact])
        return pa.schema([_field(name, kinds) for name, kinds in self._kinds.items()])


def _num_characters(value: Any) -> int:
    """About how many characters a value has; a number has none to speak of."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 0


def _kind(value: Any) -> str:
    # What most values are.
    if isinstance(value, str):
        return "string"
    # bool before int, which it is to Python.
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return _int_kind(value)
    if isinstance(value, float):
        return "whole" if value.is_integer() else "double"
    return "json"


def _int_kind(value: int) -> str:
    if -_FLOAT64_EXACT <= value <= _FLOAT64_EXACT:
        return "int"
    return "long" if -_INT64_MAX - 1 <= value <= _INT64_MAX else "json"


def _field(name: str, kinds: set[str]) -> pa.Field:
    if not kinds or kinds == {"string"}:
        return pa.field(name, pa.string())
    if kinds == {"bool"}:
        return pa.field(name, pa.bool_())
    if kinds <= {"int", "long"}:
        return pa.field(name, pa.int64())
    if kinds <= {"int", "whole", "double"}:
        return pa.field(name, pa.float64(), metadata=_NUMBERS if kinds == {"int", "double"} else None)
    return pa.field(name, pa.string(), metadata=_JSON_TEXT)


def column_array(values: Iterable[Any], field: pa.Field) -> pa.Array:
    """One column's values, as `SchemaUnifier` has seen them, in the type it found."""
    if field.metadata and field.metadata.items() >= _JSON_TEXT.items():
        values = (None if value is None else json.dumps(value, ensure_ascii=False) for value in values)
    values = list(values)
    if _has_nanoseconds(field.type):
        values = [_with_times(value, field.type) for value in values]
    return pa.array(values, type=field.type)


def changed_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with all changed that it is made of."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(changed_type(field.type, change)) for field in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(changed_type(kind.key_type, change), changed_type(kind.item_type, change), kind.keys_sorted)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return change(kind)
    item = kind.value_field.with_type(changed_type(kind.value_type, change))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)


def as_text(value: Any) -> str:
    """What JSON has no way to write: bytes, as images are, as a data URL."""
    if isinstance(value, bytes | memoryview):
        return f"data:application/octet-stream;base64,{b64encode(value).decode()}"
    return str(value)


def json_value(value: Any) -> Any:
    """A value of `plain_rows` as JSON has it: no NaN and no infinity, and as text what it has no way to write."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    return as_text(value)


def python_values(column: pa.Array) -> list[Any]:
    """A Parquet column's values for Python, from which `column_array` makes the same column again.

    Python's times have no nanoseconds: where some need them, timestamps become text, and times of day and durations
    integers. Raises OverflowError for times before the year 1 or after 9999, of which Python has none.
    """
    if _has_nanoseconds(column.type):
        column = _without_nanoseconds(column, _text_or_integer)
    values: list[Any] = column.to_pylist()
    return values


# Arrow warns of it, once for every process that reads such a row.
warnings.filterwarnings("ignore", "Encountered key .* already encountered", UserWarning, re.escape(__name__))


def plain_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as JSON and SQL have them: maps as objects, with the last value of a key that is there twice.

    Timestamps that need nanoseconds are text, and other times have none.
    """
    table = _changed_columns(table, partial(_without_nanoseconds, otherwise=_text_of_time))
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="lossy")
    return rows


def carried_values(column: pa.Array, field: pa.Field) -> list[Any]:
    """A column's values as the input had them, of the data set or the spool that `column_array` made."""
    values = python_values(column)
    match (field.metadata or {}).get(_ENCODING):
        case b"json":
            return [None if value is None else json.loads(value) for value in values]
        case b"number":
            return [int(value) if value is not None and value.is_integer() else value for value in values]
        case _:
            return values


def in_microseconds(table: pa.Table) -> pa.Table:
    """Without the nanoseconds of times, of which SQL's have none."""
    return _changed_columns(table, partial(_without_nanoseconds, otherwise=_same))


def _changed_columns(table: pa.Table, change: Callable[[pa.Array], pa.Array]) -> pa.Table:
    """With those changed that have nanoseconds."""
    for index, field in enumerate(table.schema):
        if _has_nanoseconds(field.type):
            table = table.set_column(index, field.name, change(table.column(index)))
    return table


def _has_nanoseconds(kind: pa.DataType) -> bool:
    return bool(changed_type(kind, _in_microseconds) != kind)


def _without_nanoseconds(column: pa.Array, otherwise: Callable[[pa.DataType], pa.DataType]) -> pa.Array:
    """`otherwise`: what becomes of times where some would lose digits."""
    try:
        return column.cast(changed_type(column.type, _in_microseconds))
    except pa.ArrowInvalid:
        return column.cast(changed_type(changed_type(column.type, otherwise), _in_microseconds), safe=False)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    return {pa.time64("ns"): pa.time64("us"), pa.duration("ns"): pa.duration("us")}.get(kind, kind)


def _text_of_time(kind: pa.DataType) -> pa.DataType:
    """Of a timestamp; Arrow writes no other times."""
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _same(kind: pa.DataType) -> pa.DataType:
    return kind


def _text_or_integer(kind: pa.DataType) -> pa.DataType:
    return pa.int64() if kind in (pa.time64("ns"), pa.duration("ns")) else _text_of_time(kind)


def _with_times(value: Any, kind: pa.DataType) -> Any:
    """A value in which timestamps may be texts with those as their numbers of nanoseconds."""
    if isinstance(value, str) and pa.types.is_timestamp(kind):
        return pa.scalar(value).cast(kind).value
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        return {field.name: _with_times(value.get(field.name), field.type) for field in kind.fields}
    if not isinstance(value, list):
        return value
    if pa.types.is_map(kind):
        return [(_with_times(key, kind.key_type), _with_times(item, kind.item_type)) for key, item in value]
    return [_with_times(each, kind.value_type) for each in value]


def carried_names(names: Sequence[str]) -> dict[str, str]:
    """The output's name for each of the input's columns but `custom_id`, which becomes the output's own.

    A name that headrace uses itself, in any case (SQL engines ignore it), gets `input_` in front.
    """
    taken = {name.casefold() for name in names} | RESERVED_NAMES
    carried = {}
    for name in names:
        if name == "custom_id":
            continue
        carried[name] = name
        if name.casefold() in RESERVED_NAMES:
            carried[name] = _free_name(name, taken)
            taken.add(carried[name].casefold())
    return carried


def input_names(
    carried: Iterable[str], schema_version: int = SCHEMA_VERSION, asked: Container[str] = ()
) -> dict[str, str]:
    """For the columns of such a data set that carry the input's: under what name the input had each.

    `asked`: names that the input is known to have had; of another one with `input_` in front it can not be told whether
    that was of the input.
    """
    reserved = _RESERVED_BY_VERSION[schema_version]
    own = [name for name in carried if name.casefold() not in reserved]
    # Of two that could have been one column, the longer name was the one that had to give way.
    return {name: name if name in asked else _given_name(name, reserved) for name in sorted(own, key=len)}


def _given_name(name: str, reserved: frozenset[str]) -> str:
    given = name
    while given.startswith(_PREFIX) and given.casefold() not in reserved:
        given = given.removeprefix(_PREFIX)
    return given if given.casefold() in reserved else name


def _free_name(name: str, taken: set[str]) -> str:
    name = f"{_PREFIX}{name}"
    return _free_name(name, taken) if name.casefold() in taken else name


def custom_id_of(values: Mapping[str, Any], row: int) -> str:
    """The row's own `custom_id` as text, or its number."""
    own = own_custom_id(values)
    return str(row) if own is None else own


def own_custom_id(values: Mapping[str, Any]) -> str | None:
    """What a row brings as its id, as text; None where that is nothing, which CSV says by an empty cell."""
    value = values.get("custom_id")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
