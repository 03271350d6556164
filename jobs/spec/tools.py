"""The functions that conversations may call, as OpenAI's API describes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RowError
from .json_values import json_problem

# The column of a row that has some of its own.
TOOLS = "tools"
_SHAPE = 'a list of functions: [{"type": "function", "function": {"name": "…", "parameters": {…}}}]'


def tools_problem(tools: Any) -> str | None:
    """What is wrong with a job's functions, as the end of a sentence about them; None if nothing is."""
    if not isinstance(tools, list | tuple) or not tools:
        return f"must be {_SHAPE}"
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            return f"must be {_SHAPE}, and number {number} is none"
        if not isinstance(function.get("parameters", {}), Mapping):
            return f"must have a JSON schema as 'parameters', which {name!r} has not"
    return json_problem(tools)


def row_tools(values: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The functions that a row's conversation may call, as a list of OpenAI's objects or as JSON.

    None where it says nothing of them, which in CSV is an empty text. Raises `RowError`.
    """
    tools = values.get(TOOLS)
    if tools is None or tools == "":
        return None
    if is_json := isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {TOOLS!r} is not valid JSON: {error}") from error
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f'column {TOOLS!r} must hold a list of objects: {{"type": "function", "function": {{…}}}}')
    return tools if is_json else [_without_nulls(tool) for tool in tools]


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Each with the schema of its arguments. Templates show also what OpenAI's API would not take."""
    functions = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str) and name:
            parameters = function.get("parameters")
            functions[name] = parameters if isinstance(parameters, Mapping) else {}
    return functions


def _without_nulls(value: Any) -> Any:
    """Where columns have a type, a function has all the fields that any has."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
