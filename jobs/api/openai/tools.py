"""The functions that a chat's model may call, as OpenAI's API says them, and what an answer must be to call one."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...spec.response_format import StructuredOutputs
from ...spec.tool_choice import Functions, NamedTool, ToolChoice, choice_problem, expect_choice, forced_form
from .request_body import Body, misfit


class FunctionDefinition(Body):
    """`parameters` is a JSON schema of an object. `strict` asks for what forced calls do in any case."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the caller can run."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it: no more than was given."""
        return self.model_dump(exclude_none=True)


class ToolsSubset(Body):
    """`mode`: whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    """Of the tools, those that may be called now."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolsSubset

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


ChatToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    expect_choice('{"type": "function", "function": {"name": …}} or {"type": "allowed_tools", "allowed_tools": …}'),
]


def functions_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Each with the schema of its arguments."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def forced_call(functions: Functions, choice: ToolChoice | None, is_parallel: bool) -> StructuredOutputs | None:
    """The form of an answer that has to call, as `forced_form` has it.

    Raises pydantic's error for a request that cannot be.
    """
    if (problem := choice_problem(functions, choice)) is not None:
        raise misfit("tool_choice", f"tool_choice {problem}")
    return forced_form(functions, choice, is_parallel)
