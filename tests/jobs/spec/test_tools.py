"""What a job's functions have to be."""

import pytest

from headrace.jobs.errors import SpecError
from headrace.jobs.spec.schemas import JobSpec

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([], "tools: must be a list of functions: "),
        ("f", "tools: must be a list of functions: "),
        ({"f": F}, "tools: must be a list of functions: "),
        ([F, {"name": "g"}], "tools: must be a list of functions: .*, and number 2 is none"),
        ([{**F, "type": "retrieval"}], "number 1 is none"),
        ([{"type": "function", "function": {"name": ""}}], "number 1 is none"),
        ([{"type": "function", "function": {"name": "g", "parameters": []}}], "as 'parameters', which 'g' has not"),
        ([{"type": "function", "function": {"name": "g", "default": float("nan")}}], "tools: can only have what JSON"),
        ([{"type": "function", "function": {"name": "\ud800"}}], "tools: can only have what JSON has: "),
    ],
)
def test_what_is_no_list_of_functions_is_refused(tools, problem):
    with pytest.raises(SpecError, match=problem) as refused:
        JobSpec.parse(model="m", tools=tools)
    assert refused.value.field == "tools"


def test_a_job_without_functions_is_stored_as_before_there_were_any():
    assert "tools" not in JobSpec.parse(model="m").stored()
    assert JobSpec.parse(model="m", tools=[F]).stored()["tools"] == [F]
    prints = {JobSpec.parse(model="m", tools=tools).fingerprint("x") for tools in (None, [F], [F, F])}
    assert len(prints) == 3


NAMED = {"type": "function", "function": {"name": "f"}}
THING = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {"type": "it"}}}}}
NAMED_THING = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({"tools": [F], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required' or {.*, not 'any'"),
        ({"tools": [F], "tool_choice": {"name": "f"}}, "tool_choice", "must be 'none', 'auto', 'required' or {"),
        ({"prompt": "{a}", "tool_choice": "required"}, "tool_choice", "tool_choice needs tools$"),
        ({"prompt": "{a}", "tool_choice": NAMED}, "tool_choice", "tool_choice needs tools$"),
        (
            {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "tool_choice names 'g', which is none of the tools$",
        ),
        (
            {"tools": [F], "tool_choice": "required", "sampling": {"bad_words": ["a"]}},
            "sampling.bad_words",
            "bad_words cannot be held to beside tool_choice: leave out one of the two$",
        ),
        ({"tools": [F], "tool_choice": "required", "choices": ["a", "b"]}, "tool_choice", "says what the answer is"),
        (
            {"tools": [F], "tool_choice": NAMED, "sampling": {"structured_outputs": {"regex": "a"}}},
            "tool_choice",
            "says what the answer is",
        ),
        (
            {"tools": [{**F, "function": {"name": "f", "parameters": {"type": "array"}}}], "tool_choice": NAMED},
            "tools",
            "^tools: the parameters of 'f' must have type \"object\", not 'array'$",
        ),
        (
            {"tools": [{**F, "function": {"name": "f", "parameters": {"type": ["null"]}}}], "tool_choice": "required"},
            "tools",
            "^tools: the parameters of 'f' must have type \"object\"$",
        ),
        (
            {"tools": [F, THING], "tool_choice": NAMED_THING},
            "tools",
            "^tools: the parameters of 'g': Invalid type: it$",
        ),
        ({"tools": [F, THING], "tool_choice": "required"}, "tools", "^tools: the parameters of 'g': Invalid type: it$"),
    ],
)
def test_a_choice_of_tools_that_no_answer_could_be_is_refused(given, field, problem):
    with pytest.raises(SpecError, match=problem) as refused:
        JobSpec.parse(model="m", **given)
    assert refused.value.field == field


def test_that_calls_are_not_to_be_several_is_stored_only_where_it_is_said():
    plain, once = (JobSpec.parse(model="m", tools=[F], parallel_tool_calls=many) for many in (True, False))
    assert "parallel_tool_calls" not in plain.stored()
    assert once.stored()["parallel_tool_calls"] is False
    assert plain.fingerprint("x") != once.fingerprint("x")


def test_a_choice_of_tools_is_stored_only_where_it_changes_something():
    for choice in (None, "auto"):
        assert "tool_choice" not in JobSpec.parse(model="m", tools=[F], tool_choice=choice).stored()
    choices = (None, "none", "required", NAMED)
    specs = [JobSpec.parse(model="m", tools=[F], tool_choice=choice) for choice in choices]
    assert len({spec.fingerprint("x") for spec in specs}) == len(choices)
    assert [JobSpec.model_validate(spec.stored()) for spec in specs] == specs
    assert specs[-1].stored()["tool_choice"] == NAMED
    # Rows without a template over the columns may bring functions of their own.
    assert JobSpec.parse(model="m", tool_choice="required").tools is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_may_have_integers_of_64_bits(choice):
    bounded = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    parameters = {"type": "object", "properties": {"id": bounded}, "required": ["id"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert JobSpec.parse(model="m", tools=[tool], tool_choice=choice).tools == (tool,)
