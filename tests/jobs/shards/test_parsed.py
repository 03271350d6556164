"""Answers that are JSON as values with types: what a schema says of them, and what a model makes of it."""

import json
from enum import Enum
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from headrace.jobs.shards.parsed import parsed_type, parsed_value
from headrace.jobs.spec.schemas import JobSpec


class Kind(Enum):
    BILLING = "billing"
    SHIPPING = "shipping"


class Item(BaseModel):
    name: str
    count: int | None = None


class Ticket(BaseModel):
    kind: Kind
    urgent: bool
    urgency: float
    items: list[Item] = []
    level: Literal[1, 2, 3]
    note: str | int
    extra: dict[str, int]


ITEM = pa.struct([("name", pa.string()), ("count", pa.int64())])
TICKET = pa.struct(
    [
        ("kind", pa.string()),
        ("urgent", pa.bool_()),
        ("urgency", pa.float64()),
        ("items", pa.list_(ITEM)),
        ("level", pa.int64()),
        ("note", pa.string()),
        ("extra", pa.string()),
    ]
)
ANSWER = {
    "kind": "billing",
    "urgent": True,
    "urgency": 1,
    "items": [{"name": "cup", "count": 2}, {"name": "é"}],
    "level": 3,
    "note": 7,
    "extra": {"a": 1},
}
VALUE = {
    **ANSWER,
    "urgency": 1.0,
    "items": [{"name": "cup", "count": 2}, {"name": "é", "count": None}],
    "note": "7",
    "extra": '{"a": 1}',
}


def type_of(schema: Any, **spec: Any) -> pa.DataType | None:
    return parsed_type(JobSpec.parse(model="m", sampling={"structured_outputs": {"json": schema}}, **spec))


def test_a_pydantic_model_gives_its_fields_types(tmp_path):
    assert type_of(Ticket) == TICKET
    assert type_of(json.dumps(Ticket.model_json_schema())) == TICKET
    asked = JobSpec.parse(model="m", sampling={"response_format": Ticket})
    assert parsed_type(asked) == TICKET
    given = {"type": "json_schema", "json_schema": {"schema": Ticket.model_json_schema()}}
    assert JobSpec.parse(model="m", sampling={"response_format": given}) == asked
    value = parsed_value(json.dumps(ANSWER), TICKET)
    assert value == VALUE
    table = pa.table({"parsed": pa.array([value, None], TICKET)})
    pq.write_table(table, tmp_path / "part.parquet")
    assert pq.read_table(tmp_path / "part.parquet") == table


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
LINKED: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
}
A = pa.struct([("a", pa.int64())])


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (OBJECT, A),
        ({"properties": {"a": {"type": "integer"}}}, A),
        ({"type": "array", "items": OBJECT}, pa.list_(A)),
        ({"type": "string"}, pa.string()),
        ({"enum": ["a", "b", None]}, pa.string()),
        ({"enum": [1, 2]}, pa.int64()),
        ({"enum": list(range(5000))}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": OBJECT}}, A),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": OBJECT}}, A),
        (
            {"$ref": "#/$defs/Node", "$defs": {"Node": LINKED}},
            pa.struct([("value", pa.int64()), ("next", pa.string())]),
        ),
        # Nothing is known of these that their text does not say.
        ({}, None),
        ({"type": "object"}, None),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, None),
        ({"type": "array"}, None),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "integer"}}, None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, None),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "A": {"type": "integer"}}}, None),
        ({"type": "object", "properties": {"": {"type": "integer"}}}, None),
    ],
    ids=str,
)
def test_the_type_that_a_schema_gives(schema, kind):
    assert type_of(schema) == kind


def test_a_schema_that_repeats_its_parts_without_end_gives_none():
    parts = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}, "b": {"$ref": f"#/$defs/d{n + 1}"}}}
             for n in range(20)}  # fmt: skip
    assert type_of({"$ref": "#/$defs/d0", "$defs": {**parts, "d20": OBJECT}}) is None


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)
def test_other_answers_have_none(sampling):
    assert parsed_type(JobSpec.parse(model="m", sampling=sampling)) is None


def test_neither_have_jobs_of_before_nor_batches():
    assert type_of(OBJECT, schema_version=2) is None
    assert type_of(OBJECT, endpoint="/v1/chat/completions") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, None),
        ('{"urgent": tr', None),
        ("[" * 100_000, None),
        ("[1]", None),
        ('{"urgent": 1, "urgency": true, "items": {}, "level": 1.5}', {}),
        ('{"level": 2.0, "urgency": 5}', {"level": 2, "urgency": 5.0}),
        (f'{{"level": {2**63}, "urgency": 1{"0" * 400}}}', {}),
        (r'{"kind": "a\ud800b\u0000"}', {"kind": "a?b\x00"}),
        ('{"other": 1, "items": [null, 3, {"name": null}]}', {"items": [None, None, {"name": None, "count": None}]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_null(text, value):
    expected = None if value is None else {name: value.get(name) for name in TICKET.names}
    assert parsed_value(text, TICKET) == expected
    pa.array([expected], TICKET)
