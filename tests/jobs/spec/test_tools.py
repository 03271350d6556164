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
