"""The body of `POST /v1/chat/completions`."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ....engine.sampling.defaults import SamplingDefaults
from ....engine.structured.reasoning import SWITCHES
from ....engine.text.chat_ending import ChatEnding
from ...spec.messages import template_kwargs_problem
from ...spec.response_format import StructuredOutputs
from ...spec.sampling import SamplingSpec
from ...spec.tool_choice import ToolChoice, check_form
from ..errors import ApiError
from ..schemas import Text
from .request_body import UNSUPPORTED, Body, HostedFields, Ignored, Unsupported, listed, misfit, only
from .sampling_schemas import SamplingFields
from .tools import AllowedTools, ChatToolChoice, Tool, forced_call, functions_of
from .vllm_fields import VllmChatFields

Role = Literal["system", "developer", "user", "assistant", "tool"]


def _is_read(kind: str) -> str:
    if kind not in ("text", "image_url"):
        raise PydanticCustomError(UNSUPPORTED, "only parts of type 'text' and 'image_url' are read here")
    return kind


class ImageUrl(Body):
    """An image in a data URL, `data:image/png;base64,...`: nothing is fetched from elsewhere."""

    url: str
    detail: Ignored = None


class ContentPart(Body):
    """A piece of a message's content: a text, or an image for models that read them. Sound and files are refused."""

    type: Annotated[str, AfterValidator(_is_read)]
    text: Text | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_what_it_is(self) -> Self:
        other = "image_url" if self.type == "text" else "text"
        if getattr(self, self.type) is None or getattr(self, other) is not None:
            words = {"kind": self.type, "other": other}
            raise PydanticCustomError(
                "value_error", "a part of type {kind} must have '{kind}', and no '{other}'", words
            )
        return self


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, "parts")


class FunctionCall(Body):
    """`arguments` is JSON in a text."""

    name: Text
    arguments: Text


class ToolCall(Body):
    """A call that an assistant made earlier in the conversation."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn. An answer may be sent back as it came: what it has of fields that are null is left aside."""

    role: Role
    content: (
        Annotated[list[ContentPart], BeforeValidator(_parts, json_schema_input_type=str | list[ContentPart] | None)]
        | None
    ) = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    annotations: Ignored = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise PydanticCustomError(
                "value_error", "a message of role {role} must have 'content'", {"role": self.role}
            )
        return self

    @property
    def text(self) -> str:
        """What it says, without its images."""
        return "\n".join(part.text or "" for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        message: dict[str, Any] = {
            # Templates know OpenAI's newer name for it as little as models do.
            "role": "system" if self.role == "developer" else self.role,
            "content": self._for_template(self.content or ()),
        }
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if thought := self.reasoning or self.reasoning_content:
            # Templates that show it to the model, mostly between calls, know the older name, gpt-oss's its own.
            message |= {"reasoning": thought, "reasoning_content": thought, "thinking": thought}
        return message

    @staticmethod
    def _for_template(parts: Sequence[ContentPart]) -> str | list[dict[str, Any]]:
        """One text, unless there are images."""
        if all(part.image_url is None for part in parts):
            return "\n".join(part.text or "" for part in parts)
        return [part.model_dump(include={"type", part.type}) for part in parts]


def _can_be_told(kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
    if kwargs is not None and (problem := template_kwargs_problem(kwargs)) is not None:
        raise PydanticCustomError("template_kwargs", "{problem}", {"problem": problem})
    return kwargs


ChatTemplateKwargs = Annotated[
    dict[str, Any] | None,
    AfterValidator(_can_be_told),
    Field(description="What the model's chat template is told, such as `enable_thinking`"),
]


ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Field(description='The chat template is told: `reasoning_effort`, and `enable_thinking`, false for "none"'),
]


class ChatCompletionRequest(SamplingFields, VllmChatFields, HostedFields):
    """A conversation to be answered; as in OpenAI's API, with vLLM's further sampling parameters."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: ChatTemplateKwargs = None
    tools: list[Tool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort = None

    metadata: Ignored = None
    prediction: Ignored = None
    modalities: Annotated[Any, AfterValidator(only(["text"]))] = None
    verbosity: Annotated[Any, AfterValidator(only("medium"))] = None
    functions: Annotated[Any, AfterValidator(only([], instead="say tools"))] = None
    function_call: Annotated[Any, AfterValidator(only("none", "auto"))] = None
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise misfit("top_logprobs", "top_logprobs has no meaning without logprobs: say true for them too")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise misfit("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of the two")
        self._check_allowed_tools()
        if self.forced_call is not None and (self.choices or self.structured_outputs):
            raise misfit("tool_choice", "tool_choice says what the answer is: leave out what else gives it a form")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise misfit(
                "continue_final_message",
                "continue_final_message goes on with the last message, and another one is begun unless it is told "
                "otherwise: say false for add_generation_prompt",
            )
        for name in ("allowed_token_ids", "bad_words"):
            if self.forced_call is not None and getattr(self, name):
                raise misfit(name, f"{name} cannot be held to beside tool_choice: leave out one of the two")
        return self

    def _check_allowed_tools(self) -> None:
        if isinstance(choice := self.tool_choice, AllowedTools):
            names = functions_of(self.tools or ())
            if unknown := next((name for name in sorted(choice.names) if name not in names), None):
                raise misfit("tool_choice", f"tool_choice allows {unknown!r}, which is none of the tools")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def told_template(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools; what it does not know it leaves aside."""
        effort = self.reasoning_effort
        told: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if effort is not None:
            told |= {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
        return told | (self.chat_template_kwargs or {})

    @property
    def ending(self) -> ChatEnding:
        """Where the prompt ends."""
        return ChatEnding.of(self.add_generation_prompt is not False, bool(self.continue_final_message))

    @property
    def prompt_parts(self) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]], ChatEnding]:
        """What the prompt is made of, as `LivePrompts.chat` takes it."""
        messages = [message.for_template() for message in self.messages]
        return messages, self.told_template, [tool.for_template() for tool in self.callable_tools], self.ending

    @property
    def begun(self) -> str | None:
        """The answer that is gone on with, if one is."""
        last = self.messages[-1]
        is_begun = self.ending is ChatEnding.WITHIN_LAST_MESSAGE and last.role == "assistant"
        return last.text if is_begun else None

    @property
    def echoed(self) -> str:
        """What stands in front of each answer."""
        last = self.messages[-1]
        is_echoed = bool(self.echo) and last.role == "assistant"
        return last.text if is_echoed else ""

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the model is shown: of others it would call one."""
        if not isinstance(choice := self.tool_choice, AllowedTools):
            return self.tools or []
        return [tool for tool in self.tools or () if tool.function.name in choice.names]

    @cached_property
    def callable_functions(self) -> dict[str, dict[str, Any]]:
        """Those that may be called, each with the schema of its arguments."""
        return functions_of(self.callable_tools)

    @property
    def calls(self) -> ToolChoice:
        """Which tools are to be called; "none" where there are none."""
        choice = self.tool_choice or "auto"
        return "none" if not self.tools else choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice

    @cached_property
    def forced_call(self) -> StructuredOutputs | None:
        """The form of an answer that has to call a tool."""
        choice = self.calls if isinstance(self.tool_choice, AllowedTools) else self.tool_choice
        return forced_call(self.callable_functions, choice, self.parallel_tool_calls is not False)

    def sampling(self, default_max_tokens: int, default_seed: int, defaults: SamplingDefaults) -> SamplingSpec:
        try:
            check_form(self.forced_call, self.callable_functions, self.calls)
        except ValueError as error:
            # Under the name that the request has it.
            raise ApiError(400, f"tools: {error}", "invalid_value", "tools") from error
        return super().sampling(default_max_tokens, default_seed, defaults)

    def _of_its_own(self) -> dict[str, Any]:
        # As with OpenAI: the format is that of an answer which is no call.
        forced = {"structured_outputs": self.forced_call, "response_format": None}
        form = {} if self.forced_call is None else forced
        return {"logprobs": bool(self.logprobs), "top_logprobs": self.top_logprobs or 0, **form}
