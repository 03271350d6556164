"""The body of `POST /v1/responses`, and the chat that it asks for. Source: OpenAI's Responses API."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ....engine.errors import InvalidRequestError
from ....engine.text.chat_ending import CONTINUE
from ...spec.sampling import SamplingSpec
from ...spec.tool_choice import expect_choice
from ..errors import ApiError
from ..schemas import Text
from .batch_schemas import Metadata
from .chat_schemas import ChatCompletionRequest, ChatTemplateKwargs, ReasoningEffort
from .request_body import UNSUPPORTED, Body, HostedFields, Ignored, Unsupported, listed, misfit, only, parse_body
from .response_items import InputItem, messages_of
from .sampling_schemas import Seed
from .tools import FunctionDefinition

_LOGPROBS = "message.output_text.logprobs"
# Which of a chat's fields a request's become.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    CONTINUE: "input",
}
# What has a chat go on from its last message.
_GOING_ON = {"add_generation_prompt": False, CONTINUE: True}
NOT_KEPT = "nothing is kept here: send the whole conversation as input"


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else listed(given, "items")


class FunctionTool(FunctionDefinition):
    """A function that the caller can run. Tools that OpenAI runs by itself are not here."""

    type: Literal["function"]
    defer_loading: Annotated[Any, AfterValidator(only(False))] = None

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            words = {"kind": kind[:40]}
            raise PydanticCustomError(UNSUPPORTED, "{kind} is not run here: only your own functions are called", words)
        return given

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type", "defer_loading"})}


class NamedFunctionTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    name: Text

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctionTools(Body):
    """Of the tools, those that may be called now; `mode`: whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(min_length=1)]


ResponsesToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunctionTool | AllowedFunctionTools,
    expect_choice('{"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'),
]


class TextFormat(Body):
    """Any text, any JSON object, or JSON that follows a schema, whether `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(f"type {self.type} {'lacks' if self.schema_ is None else 'has no use for'} a schema")
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, AfterValidator(only("medium"))] = None


class ReasoningOptions(Body):
    """`effort`: as a chat's `reasoning_effort`."""

    effort: ReasoningEffort = None
    summary: Annotated[Any, AfterValidator(only("auto"))] = None
    generate_summary: Annotated[Any, AfterValidator(only("auto"))] = None


class ResponsesRequest(HostedFields):
    """A conversation to be answered. What is thought is an item of its own, of models that think."""

    model: Text
    input: Annotated[
        list[InputItem],
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: Ignored = None
    metadata: Metadata | None = None
    truncation: Annotated[Any, AfterValidator(only("disabled"))] = None

    seed: Seed | None = None
    chat_template_kwargs: ChatTemplateKwargs = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    cancel_on_disconnect: bool | None = None

    previous_response_id: Annotated[Any, AfterValidator(only(instead=NOT_KEPT))] = None
    conversation: Annotated[Any, AfterValidator(only(instead=NOT_KEPT))] = None
    background: Annotated[Any, AfterValidator(only(False, instead="send it in a batch"))] = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    user: Ignored = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if isinstance(self.tool_choice, NamedFunctionTool) and not self.tools:
            raise misfit("tool_choice", "tool_choice needs tools")
        return self

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatCompletionRequest:
        """The same as a chat. Raises `ApiError` (400), naming the field at fault as it is called here."""
        form = self.text.format if self.text is not None else None
        given = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.has_logprobs or None,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "response_format": None if form is None or form.type == "text" else form.for_chat(),
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": self._chat_tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
            "seed": self.seed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "include_reasoning": True,
            **(_GOING_ON if self.input[-1].is_begun else {}),
            "thinking_token_budget": self.thinking_token_budget,
            "cancel_on_disconnect": self.cancel_on_disconnect,
        }
        with renamed():
            return parse_body(ChatCompletionRequest, given)

    def _chat_tool_choice(self) -> Any:
        match self.tool_choice:
            case NamedFunctionTool():
                return self.tool_choice.for_chat()
            case AllowedFunctionTools(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [tool.for_chat() for tool in tools]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
            case choice:
                return choice

    def _messages(self) -> list[dict[str, Any]]:
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*first, *messages_of(self.input)]

    def told_again(self, sampling: SamplingSpec) -> dict[str, Any]:
        """What a response says of its request, which is sampled so."""
        form = self.text.format if self.text is not None and self.text.format is not None else TextFormat(type="text")
        choice = self.tool_choice or "auto"
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(exclude={"defer_loading"}) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }


@contextmanager
def renamed() -> Iterator[None]:
    """Errors about a chat's fields become such about the fields that they were made of."""
    try:
        yield
    except ApiError as error:
        if (param := _own_name(error.param)) is None:
            raise
        detail = str(error.detail).replace(error.param or "", param)
        raise ApiError(error.status_code, detail, error.code, param) from error
    except InvalidRequestError as error:
        if (param := _own_name(error.field)) is None:
            raise
        raise type(error)(str(error).replace(error.field or "", param), param) from error


def _own_name(given: str | None) -> str | None:
    """A chat's field as it is called here; None where it is called the same."""
    given = given or ""
    name = next((name for name in _NAMES if given == name or given.startswith((f"{name}.", f"{name}["))), None)
    if name is None:
        return None
    # Messages are counted otherwise than items.
    return _NAMES[name] + ("" if name == "messages" else given.removeprefix(name).removeprefix(".json_schema"))
