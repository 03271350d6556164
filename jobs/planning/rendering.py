"""From a row of the input to the text the model reads."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.checkpoints.hub import public_name
from ...engine.errors import InvalidRequestError
from ...engine.text.chat_ending import ChatEnding
from ...engine.text.messages import with_plain_texts
from ...engine.text.tokenizer import Tokenizer
from ...engine.vision.image_size import Grid
from ...engine.vision.reading import ImageReader, files_of, has_images
from ...storage.errors import Argument
from ..errors import RowError, SpecError
from ..spec.messages import messages_problem, says_nothing, template_kwargs_problem, without_absent
from ..spec.prompt_template import PromptTemplate, is_among
from ..spec.row_images import row_images
from ..spec.schemas import JobSpec
from ..spec.tool_choice import choice_problem, is_forced
from ..spec.tools import TOOLS, functions_of, row_tools

if TYPE_CHECKING:
    # With it comes a template engine, which not every command needs.
    from ...engine.text.chat_frame import ChatFrame


# The column of a row that has the chat template told more.
TEMPLATE_KWARGS = "chat_template_kwargs"
# That of a batch's row which says where its prompt ends.
CHAT_ENDING = "chat_ending"
_PROMPT, _IMAGE = Argument("prompt"), Argument("image")


class IllustratedPrompt(NamedTuple):
    """A prompt's text, in which each image has a place of one token, and the images' files with what these become."""

    text: str
    files: tuple[bytes, ...]
    grids: tuple[Grid, ...]


class PromptRenderer:
    """Turns rows into prompts for one job and model.

    A model with a chat template gets a conversation, one without gets plain text, the system text in front. Requests to
    `/v1/completions` bring the text, or its tokens, as the model is to continue it.
    """

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer, columns: Sequence[str]) -> None:
        """Raises `SpecError` when no row of the input could be rendered: `columns` are the input's."""
        self._tokenizer = tokenizer
        self._system = spec.system
        self._is_of_batch = spec.samples_each_row
        self._is_raw = spec.endpoint == "/v1/completions"
        self._template = None if self._is_raw else _template(spec, columns)
        if self._template is None and not self._is_raw and not tokenizer.has_chat_template:
            problem = f"model {spec.model} has no chat template for the column 'messages'"
            raise SpecError(problem, ": pass ", _PROMPT, field="prompt")
        if spec.chat_template_kwargs and (self._is_raw or not tokenizer.has_chat_template):
            problem = f"model {spec.model} has no chat template to be told anything"
            kwargs = Argument("chat_template_kwargs")
            raise SpecError(problem, ": leave out ", kwargs, field=kwargs.name)
        self._tools: list[Mapping[str, Any]] = list(spec.tools or ())
        self._tool_choice = spec.tool_choice
        if is_forced(spec.tool_choice) and not self._tools and TOOLS not in columns:
            problem = " needs tools: the job has none, nor the input a column 'tools'"
            raise SpecError(Argument("tool_choice"), problem, field="tool_choice")
        # A forced call is one with any template.
        self._shows_tools = tokenizer.has_chat_template and tokenizer.tools_template_has(TOOLS)
        if self._tools and not self._shows_tools and not is_forced(spec.tool_choice):
            problem = f"the chat template of model {public_name(spec.model)} has no tools"
            raise SpecError(problem, ": leave out ", Argument("tools"), field="tools")
        # A batch's requests say each what they are told.
        thinks = None if spec.samples_each_row else spec.sampling.reasoning
        self._template_kwargs = tokenizer.template_kwargs(spec.chat_template_kwargs or {}, thinks, spec.told_time)
        self._model_name = public_name(spec.model)
        self.image_column = spec.image
        if spec.image is not None:
            self._check_images(spec.image, columns)
        self._frame = self._chat_frame()

    def _chat_frame(self) -> "ChatFrame | None":
        is_more = self.image_column is not None or bool(self._tools)
        if self._template is None or is_more or not self._tokenizer.has_chat_template:
            return None
        # What does not fit the template is each row's error.
        with suppress(InvalidRequestError):
            return self._tokenizer.chat_frame(self._system, self._template_kwargs)
        return None

    @cached_property
    def images(self) -> ImageReader:
        """What the model can do with images."""
        return ImageReader.of_model(self._tokenizer.folder, self._model_name)

    def _check_images(self, column: str, columns: Sequence[str]) -> None:
        if column not in columns:
            problem = f" names the column {column!r}; the input has {_listed(columns)}"
            raise SpecError(_IMAGE, problem, field="image")
        if self.images.vision is None or not self._tokenizer.has_chat_template:
            missing = "reads no images" if self.images.vision is None else "has no chat template for images"
            problem = f"model {self._model_name} {missing}"
            raise SpecError(problem, ": leave out ", _IMAGE, ", or name another model", field="image")

    def render(self, values: Mapping[str, Any]) -> str | list[int] | IllustratedPrompt:
        """The whole prompt, to be encoded with special tokens as `adds_special_tokens` says, unless it is in tokens.

        Raises `RowError`.
        """
        if self._is_raw:
            return values["prompt"]  # type: ignore[no-any-return]
        own_kwargs = _template_kwargs(values)
        if self._template is None:
            messages, tools = _messages(values, self._system), self._tools_of(values)
            if self.image_column is not None or has_images(messages):
                return self._illustrated(messages, values, own_kwargs, tools)
            return self._chat(messages, own_kwargs, tools, self._ending_of(values))
        text = self._template.render(values)
        if not text.strip():
            raise RowError("prompt is empty")
        if self._frame is not None and not own_kwargs:
            return self._frame.around(text)
        if self._tokenizer.has_chat_template:
            system = [{"role": "system", "content": self._system}] if self._system else []
            messages = [*system, {"role": "user", "content": text}]
            if self.image_column is not None:
                return self._illustrated(messages, values, own_kwargs, self._tools)
            return self._chat(messages, own_kwargs, self._tools)
        return f"{self._system}\n\n{text}" if self._system else text

    @property
    def adds_special_tokens(self) -> bool:
        """A chat template writes the special tokens itself."""
        return self._is_raw or not self._tokenizer.has_chat_template

    def _ending_of(self, values: Mapping[str, Any]) -> ChatEnding:
        named = values.get(CHAT_ENDING) if self._is_of_batch else None
        return ChatEnding.ANSWER if named is None else ChatEnding(named)

    def _tools_of(self, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        own = row_tools(values)
        tools = self._tools if own is None else own
        if (problem := choice_problem(functions_of(tools), self._tool_choice)) is not None:
            raise RowError(f"tool_choice {problem}")
        if tools and not self._shows_tools and not is_forced(self._tool_choice):
            raise RowError(f"column {TOOLS!r}: the chat template of the model has no tools")
        return tools

    def _illustrated(
        self,
        messages: list[Mapping[str, Any]],
        values: Mapping[str, Any],
        own_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str | IllustratedPrompt:
        """The prompt of messages some of which have images, or whose images a column has."""
        try:
            own = row_images(values, self.image_column) if self.image_column is not None else []
            placed = messages if has_images(messages) else _with_places(messages, len(own))
            split, pictures = self.images.split(placed, rest := iter(own))
            if next(rest, None) is not None:
                raise RowError(f"column {self.image_column!r} has more images than the messages have parts for them")
            files = files_of(pictures)
            grids = self.images.grids(files)
        except InvalidRequestError as error:
            raise RowError(str(error)) from error
        text = self._chat(split, own_kwargs, tools, self._ending_of(values))
        return IllustratedPrompt(text, files, grids) if files else text

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        own_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        ending: ChatEnding = ChatEnding.ANSWER,
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, {**self._template_kwargs, **own_kwargs}, tools, ending)
        except InvalidRequestError as error:
            raise RowError(str(error)) from error


def _listed(columns: Sequence[str]) -> str:
    """Their names, in quotes where it would not be seen where one ends."""
    return ", ".join(name if name == name.strip() and "," not in name else repr(name) for name in columns)


def _template(spec: JobSpec, columns: Sequence[str]) -> PromptTemplate | None:
    """The job's template, or None when rows bring their own messages."""
    if spec.prompt is not None:
        template = PromptTemplate(spec.prompt)
        for name in template.columns:
            if not is_among(name, columns):
                problem = f" names the column {name!r}; the input has {_listed(columns) or 'no columns'}"
                raise SpecError(_PROMPT, problem, field="prompt")
        return template
    if "messages" in columns:
        return None
    if "prompt" in columns:
        return PromptTemplate("{prompt}")
    if {"custom_id", "url", "body"} <= set(columns):
        raise SpecError("the input has requests of OpenAI's Batch API: `headrace run-batch` answers them")
    example = Argument("prompt", f"{{{columns[0]}}}") if columns else _PROMPT
    problem = f"the input has neither a 'messages' nor a 'prompt' column, but {_listed(columns)}"
    raise SpecError(problem, ": pass ", example, field="prompt")


def _template_kwargs(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a row has the chat template told, as an object or as JSON."""
    kwargs = values.get(TEMPLATE_KWARGS)
    # CSV has no other way to say nothing.
    if kwargs is None or kwargs == "":
        return {}
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column {TEMPLATE_KWARGS!r} is not valid JSON: {error}") from error
    if (problem := template_kwargs_problem(kwargs)) is not None:
        raise RowError(f"column {TEMPLATE_KWARGS!r} {problem}")
    # Where columns have a type, a row has all the names that any row has.
    return {name: value for name, value in kwargs.items() if value is not None}


def _messages(values: Mapping[str, Any], system: str | None) -> list[Mapping[str, Any]]:
    """A row's conversation; the job's system text goes in front unless the row brings its own."""
    messages = values.get("messages")
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise RowError(f"column 'messages' is not valid JSON: {getattr(error, 'msg', error)}") from error
    problem = messages_problem(messages)
    if problem is not None:
        raise RowError(f"column 'messages' {problem}")
    assert isinstance(messages, list)
    # Of a live request it may be meant; in a data set it is a hole.
    if says_nothing(messages):
        raise RowError("prompt is empty")
    messages = without_absent(with_plain_texts(messages))
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _with_places(messages: list[Mapping[str, Any]], num_images: int) -> list[Mapping[str, Any]]:
    """Messages without a word of their images: these are put in front of what the user says first."""
    first = next((index for index, each in enumerate(messages) if each["role"] == "user"), 0)
    text = {"type": "text", "text": str(messages[first].get("content") or "")}
    shown = {**messages[first], "content": [*[{"type": "image"}] * num_images, text]}
    return [*messages[:first], shown, *messages[first + 1 :]]
