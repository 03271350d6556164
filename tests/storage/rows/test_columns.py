"""Types and names of columns."""

import datetime
import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.rows.columns import (
    SchemaUnifier,
    carried_names,
    carried_values,
    column_array,
    custom_id_of,
    input_names,
    python_values,
)


def unified(*values: Any) -> pa.Field:
    unifier = SchemaUnifier()
    for value in values:
        unifier.observe({"a": value})
    return unifier.schema().field("a")


def through(*values: Any) -> list[Any]:
    written: list[Any] = column_array(values, unified(*values)).to_pylist()
    return written


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([True, None], pa.bool_()),
        ([1, -(2**63), 2**63 - 1], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([2**53, 2.5], pa.float64()),
        (["x", None], pa.string()),
        ([None], pa.string()),
    ],
    ids=str,
)
def test_values_that_go_together(values: list[Any], type_: pa.DataType) -> None:
    assert unified(*values).type == type_
    assert through(*values) == values


@pytest.mark.parametrize(
    "values",
    [
        [1, "x"],
        [True, 1],
        [{"a": [1]}, None],
        [[1], "x"],
        [2**63],
        # As float64 it would be another integer.
        [2**53 + 1, 2.5],
    ],
    ids=str,
)
def test_values_that_do_not_go_together_become_json(values: list[Any]) -> None:
    field = unified(*values)
    assert field.type == pa.string()
    assert field.metadata == {b"headrace.encoding": b"json"}
    texts = through(*values)
    assert [None if text is None else json.loads(text) for text in texts] == values


def test_whole_numbers_among_others_are_known_as_such() -> None:
    """Unless some whole ones were written with a point, too."""
    column = column_array([1, 2.5, None], unified(1, 2.5, None))
    assert list(map(repr, carried_values(column, unified(1, 2.5)))) == ["1", "2.5", "None"]
    assert list(map(repr, carried_values(column, unified(1, 2.0, 2.5)))) == ["1.0", "2.5", "None"]
    assert list(map(repr, carried_values(column, unified(1.0, 2.5)))) == ["1.0", "2.5", "None"]


def test_columns_come_in_the_order_they_appear_in() -> None:
    unifier = SchemaUnifier()
    for values in ({"b": 1}, {}, {"a": "x", "b": None}, {"c": None}):
        unifier.observe(values)
    assert unifier.schema() == pa.schema({"b": pa.int64(), "a": pa.string(), "c": pa.string()})


def test_exact_types_stay_but_may_be_null() -> None:
    exact = pa.schema([pa.field("a", pa.uint8(), nullable=False), pa.field("b", pa.decimal128(5, 2))])
    unifier = SchemaUnifier(exact)
    unifier.observe({"a": "another", "c": 1})
    assert unifier.schema() == pa.schema({"a": pa.uint8(), "b": pa.decimal128(5, 2)})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("aé€"),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab"), values, max_size=3),
    max_leaves=5,
)


@given(st.lists(json_values, min_size=1, max_size=8))
def test_no_value_is_lost(values: list[Any]) -> None:
    field = unified(*values)
    written = column_array(values, field).to_pylist()
    if field.metadata:
        written = [None if text is None else json.loads(text) for text in written]
    assert written == values


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, -1_000_000_001], pa.timestamp("ns")),
        pa.array([1, None, 1_000_000_001], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([1_000, None], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([1, None], pa.time64("ns")),
        pa.array([1, None], pa.duration("ns")),
        pa.array([1, None], pa.duration("s")),
        pa.array([[1], None, [1_000]], pa.list_(pa.timestamp("ns"))),
        pa.array([[1, 2], None], pa.list_(pa.timestamp("ns", "UTC"), 2)),
        pa.array([{"a": "x", "t": 1}, None], pa.struct([("a", pa.string()), ("t", pa.timestamp("ns"))])),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.timestamp("ns"))),
        pa.array([[1], None], pa.list_(pa.time64("ns"))),
        pa.array([datetime.date(1, 1, 1), None]),
        pa.array([b"\xff", None]),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array([{"x": [1]}, None]),
    ],
    ids=lambda array: str(array.type),
)
def test_parquet_types_survive_python(array: pa.Array) -> None:
    again = column_array(python_values(array), pa.field("a", array.type))
    assert again.type == array.type
    assert again.equals(array)


def test_batches_with_and_without_nanoseconds_meet_in_a_shard() -> None:
    kind = pa.timestamp("ns", "UTC")
    values = [value for batch in ([1], [1_000]) for value in python_values(pa.array(batch, kind))]
    assert column_array(values, pa.field("a", kind)).equals(pa.array([1, 1_000], kind))


def test_names_of_ours_are_carried_under_another() -> None:
    assert carried_names(["text", "custom_id", "row", "Label", "probabilities"]) == {
        "text": "text",
        "row": "input_row",
        "Label": "input_Label",
        "probabilities": "input_probabilities",
    }


def test_a_data_set_of_before_has_the_inputs_columns_that_are_ours_now() -> None:
    names = ["row", "margin", "label", "input_output", "input_margin"]
    assert input_names(names, schema_version=1) == {
        "margin": "margin",
        "input_output": "output",
        "input_margin": "input_margin",
    }
    assert input_names(names) == {"input_output": "output", "input_margin": "margin"}
    assert input_names(["parsed", "input_margin"], schema_version=2) == {"parsed": "parsed", "input_margin": "margin"}
    assert input_names(["parsed", "input_parsed"]) == {"input_parsed": "parsed"}
    assert input_names(names, asked=["input_margin"])["input_margin"] == "input_margin"


def test_carried_names_do_not_meet() -> None:
    carried = carried_names(["output", "Input_Output", "OUTPUT", "input_error"])
    assert carried["output"] == "input_input_output"
    folded = [name.casefold() for name in carried.values()]
    assert len(set(folded)) == 4


@pytest.mark.parametrize(
    ("values", "custom_id"),
    [
        ({}, "7"),
        ({"custom_id": None}, "7"),
        ({"custom_id": ""}, "7"),
        ({"custom_id": 0}, "0"),
        ({"custom_id": "x"}, "x"),
        ({"custom_id": 12}, "12"),
    ],
)
def test_custom_id(values: dict[str, Any], custom_id: str) -> None:
    assert custom_id_of(values, 7) == custom_id


def test_of_a_key_that_a_map_has_twice_rows_have_the_last_value_and_nobody_is_warned():
    """Arrow's warning would go to the terminal, between the rows. (Tests have filters of their own.)"""
    code = (
        "import pyarrow as pa; from headrace.storage.rows.columns import plain_rows;"
        "maps = pa.array([[('k', 1), ('k', 2)], None], pa.map_(pa.string(), pa.int8()));"
        "print(plain_rows(pa.table({'a': maps})))"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("[{'a': {'k': 2}}, {'a': None}]\n", "")


WITHOUT_PANDAS = """
import sys
class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, NoPandas())
import pyarrow as pa
from headrace.storage.rows.columns import column_array, in_microseconds, plain_rows, python_values
"""


@pytest.mark.parametrize(
    ("kind", "value", "told", "in_sql"),
    [
        ("pa.timestamp('ns')", "1", "1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00"),
        ("pa.list_(pa.timestamp('ns'))", "[1]", "['1970-01-01 00:00:00.000000001']", None),
        ("pa.struct([('t', pa.timestamp('ns'))])", "{'t': 1}", "{'t': '1970-01-01 00:00:00.000000001'}", None),
        ("pa.time64('ns')", "1_001", "00:00:00.000001", "00:00:00.000001"),
        ("pa.duration('ns')", "1_001", "0:00:00.000001", "0:00:00.000001"),
    ],
)
def test_nanoseconds_need_no_pandas(kind: str, value: str, told: str, in_sql: str | None) -> None:
    """Which an installation does not bring along: Arrow has no other type for them."""
    code = (
        f"array = pa.array([{value}, None], {kind})\n"
        "assert column_array(python_values(array), pa.field('a', array.type)).equals(array)\n"
        "table = pa.table({'a': array})\n"
        "print(plain_rows(table)[0]['a'])\n"
        "print(plain_rows(in_microseconds(table))[0]['a'])\n"
    )
    command = [sys.executable, "-c", WITHOUT_PANDAS + code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stderr == ""
    first, second = ran.stdout.splitlines()
    assert first == told
    assert in_sql is None or second == in_sql
