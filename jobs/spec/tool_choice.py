"""Whether an answer has to call a tool, as OpenAI's `tool_choice` says it, and what it looks like then."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from ...engine.structured.closed_schema import closed
from ...engine.structured.schema_numbers import within_range
from ...engine.structured.structured_outputs import WHITESPACE
from .response_format import StructuredOutputs, checked

# By a function's name the JSON schema of its arguments; empty where it takes none.
Functions = Mapping[str, Mapping[str, Any]]

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(BaseModel):
    model_config = _STRICT

    name: str


class NamedTool(BaseModel):
    """The one function that is to be called."""

    model_config = _STRICT

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


def choice_problem(functions: Functions, choice: ToolChoice | None) -> str | None:
    """Why no answer can be as `choice` wants it, as the end of a sentence about it; None if one can."""
    if not is_forced(choice):
        return None
    if not functions:
        return "needs tools"
    if isinstance(choice, NamedTool) and choice.function.name not in functions:
        return f"names {choice.function.name!r}, which is none of the tools"
    return None


def is_forced(choice: ToolChoice | None) -> bool:
    """Whether the answer has to be a call."""
    return choice == "required" or isinstance(choice, NamedTool)


def forced_form(functions: Functions, choice: ToolChoice | None, is_parallel: bool = True) -> StructuredOutputs | None:
    """The form of an answer that has to call: the arguments alone of a named function, or a list of calls.

    None where the model is free. `is_parallel`: whether there may be several. `choice_problem` has found none.
    """
    if isinstance(choice, NamedTool):
        return _arguments(functions[choice.function.name])
    return StructuredOutputs(grammar=_calls_grammar(functions, is_parallel)) if choice == "required" else None


def check_form(form: StructuredOutputs | None, functions: Functions, choice: ToolChoice | None) -> None:
    """Compile what `forced_form` has made of the others. Raises `ValueError` naming the function at fault."""
    for name in _forced_names(functions, choice):
        kinds = functions[name].get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            given = f", not {kinds!r}" if isinstance(kinds, str) else ""
            raise ValueError(f'the parameters of {name!r} must have type "object"{given}')
    try:
        checked(form)
    except ValueError as error:
        raise ValueError(_fault(functions, choice) or str(error)) from error


def _forced_names(functions: Functions, choice: ToolChoice | None) -> Iterator[str]:
    """Those of which one is called."""
    yield from (choice.function.name,) if isinstance(choice, NamedTool) else functions if is_forced(choice) else ()


def _fault(functions: Functions, choice: ToolChoice | None) -> str | None:
    """Which function's parameters can not be compiled, and why: a grammar of all says neither."""
    for name in _forced_names(functions, choice):
        try:
            checked(_arguments(functions[name]))
        except ValueError as error:
            return f"the parameters of {name!r}: {error}"
    return None


def _arguments(parameters: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json_=_of_object(parameters), disable_any_whitespace=True)


def _of_object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Whoever leaves out the type means one, as arguments are."""
    return {**parameters, "type": "object"} if parameters else _NOTHING


def _calls_grammar(functions: Functions, is_parallel: bool) -> str:
    """`[{"name": …, "parameters": …}, …]`, in Lark. Each schema is a document of its own: its `$ref`s stay in it."""
    further = ' (", " call)*' if is_parallel else ""
    rules = [f'start: "[" call{further} "]"']
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, (name, arguments) in enumerate(functions.items()):
        # Lark's strings are JSON's.
        head = json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ')
        schema = {**within_range(closed(_of_object(arguments))), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f'call_{index}: {head} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules)
