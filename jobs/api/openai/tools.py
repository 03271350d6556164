"""The functions that a chat's model may call, as OpenAI's API says them, and what an answer must be to call one."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...response_format import StructuredOutputs
from .body import Body, misfit

# What a function without parameters takes.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# Where the parts of a schema are that it refers to from its root.
_SHARED = ("$defs", "definitions")


class FunctionDefinition(Body):
    """`parameters` is a JSON schema of an object. `strict` asks for what forced calls do in any case."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or _NOTHING


class Tool(Body):
    """A function that the caller can run."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it: no more than was given."""
        return self.model_dump(exclude_none=True)


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def forced_call(tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool) -> StructuredOutputs | None:
    """The form of an answer that has to call: the arguments alone of a named function, or a list of calls.

    None where the model is free. `is_parallel`: whether there may be several. Raises pydantic's error for a request
    that cannot be.
    """
    if isinstance(choice, NamedTool):
        return StructuredOutputs(json_=_named(tools, choice.function.name), disable_any_whitespace=True)
    if choice != "required":
        return None
    calls = [_call_schema(tool.function) for tool in tools]
    most = {} if is_parallel else {"maxItems": 1}
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, **_shared(tools)}
    return StructuredOutputs(json_=schema, disable_any_whitespace=True)


def _named(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.schema_of_arguments
    raise misfit("tool_choice", f"tool_choice names {name!r}, which is none of the tools")


def _call_schema(function: FunctionDefinition) -> dict[str, Any]:
    own = {key: value for key, value in function.schema_of_arguments.items() if key not in _SHARED}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _shared(tools: Sequence[Tool]) -> dict[str, Any]:
    """What the functions' schemas refer to, at the root of the one that has them all."""
    shared: dict[str, dict[str, Any]] = {}
    for tool in tools:
        for key in _SHARED:
            parts: Mapping[str, Any] = tool.function.schema_of_arguments.get(key) or {}
            known = shared.setdefault(key, {})
            for name, part in parts.items():
                if known.setdefault(name, part) != part:
                    raise misfit("tools", f"tools have different {key} of the name {name!r}: rename one of them")
    return {key: parts for key, parts in shared.items() if parts}
