"""The functions that a chat's model may call, as OpenAI's API says them, and what an answer must be to call one."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from ....engine.structured.closed_schema import closed
from ....engine.structured.structured_outputs import WHITESPACE
from ...spec.response_format import StructuredOutputs
from .body import Body, misfit

# What a function without parameters takes.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


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


def expect_choice(named: str) -> WrapValidator:
    """For `tool_choice`, a word or an object like `named`: pydantic would name the type of the first alone."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError as error:
            problem = f"must be 'none', 'auto', 'required' or {named}"
            raise PydanticCustomError("tool_choice", "{problem}", {"problem": problem}) from error

    return WrapValidator(check)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    expect_choice('{"type": "function", "function": {"name": …}}'),
]


def forced_call(tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool) -> StructuredOutputs | None:
    """The form of an answer that has to call: the arguments alone of a named function, or a list of calls.

    None where the model is free. `is_parallel`: whether there may be several. Raises pydantic's error for a request
    that cannot be.
    """
    if isinstance(choice, NamedTool):
        return StructuredOutputs(json_=_named(tools, choice.function.name), disable_any_whitespace=True)
    if choice != "required":
        return None
    return StructuredOutputs(grammar=_calls_grammar([tool.function for tool in tools], is_parallel))


def _named(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool.function.name == name:
            return tool.function.schema_of_arguments
    raise misfit("tool_choice", f"tool_choice names {name!r}, which is none of the tools")


def _calls_grammar(functions: Sequence[FunctionDefinition], is_parallel: bool) -> str:
    """`[{"name": …, "parameters": …}, …]`, in Lark. Each schema is a document of its own: its `$ref`s stay in it."""
    further = ' (", " call)*' if is_parallel else ""
    rules = [f'start: "[" call{further} "]"']
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        # Lark's strings are JSON's.
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        schema = {**closed(function.schema_of_arguments), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f'call_{index}: {head} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules)
