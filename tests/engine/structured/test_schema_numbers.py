"""Numbers in schemas: which are refused, as no answer could be held to them, and which are brought into range."""

import json
import subprocess
import sys
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.structured.grammar import check_grammar
from headrace.engine.structured.structured_outputs import StructuredOutputsParams

LEAST, MOST = -(2**63), 2**63 - 1
WHOLE = {"type": "integer"}
CHECK = """
import json, sys
from headrace.engine.structured.grammar import check_grammar
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
try:
    check_grammar(StructuredOutputsParams(**json.loads(sys.argv[1])))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"json": {"const": LEAST + 1}}, f"const has {LEAST + 1}"),
        ({"grammar": 'start: %json {"const": -9223372036854775807}'}, f"const has {LEAST + 1}"),
        ({"json": {**WHOLE, "minimum": LEAST, "maximum": LEAST}}, f"maximum is {LEAST}, beyond the integers of 64"),
        ({"json": {**WHOLE, "allOf": [{"minimum": LEAST}, {"maximum": LEAST}]}}, f"maximum is {LEAST}, beyond"),
        ({"json": {"type": "array", "items": {**WHOLE, "multipleOf": 2**31}}}, "multipleOf, without zeros and all"),
        (
            {"json": {**WHOLE, "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
            "multipleOf, without zeros and all",
        ),
    ],
    ids=str,
)
def test_what_ends_the_compiler_or_takes_it_minutes_is_refused(given: dict[str, Any], problem: str) -> None:
    """One request could end a server that all share. In a process of its own, for the day when it does again."""
    command = [sys.executable, "-c", CHECK, json.dumps(given)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.startswith(f"structured_outputs: json: {problem}")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"const": 2**53 + 1}, "const has 9007199254740993, and numbers beyond 2\\*\\*53 are not told from"),
        ({"enum": [1, [{"a": 2**70}]]}, "enum has 1180591620717411303424, and numbers"),
        (
            {**WHOLE, "minimum": 2**70},
            "minimum is 1180591620717411303424, beyond the integers of 64 bits: leave it out",
        ),
        ({"type": "number", "exclusiveMaximum": -1e19}, "exclusiveMaximum is -1e\\+19, beyond"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 10**16 + 1}}}, "const has"),
    ],
    ids=str,
)
def test_numbers_that_an_answer_would_miss_are_refused_by_name(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^structured_outputs: json: {problem}"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**WHOLE, "minimum": LEAST, "maximum": MOST},
        {"type": ["integer", "null"], "exclusiveMinimum": LEAST - 1, "exclusiveMaximum": 2**64},
        {"type": "object", "properties": {"maximum": {"type": "array", "items": {**WHOLE, "minimum": LEAST}}}},
        {**WHOLE, "multipleOf": 86400},
        {"type": "number", "minimum": 0, "maximum": 1e18, "multipleOf": 0.01},
        {"const": 2**53},
        {"enum": [True, -(2**53), 0.1]},
    ],
    ids=str,
)
def test_numbers_within_64_bits_can_be_compiled(schema: dict[str, Any]) -> None:
    check_grammar(StructuredOutputsParams(json=schema))
