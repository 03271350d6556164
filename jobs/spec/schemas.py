"""What users send: a job's description, checked once."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ...engine.checkpoints.hub import model_name
from ...engine.errors import InvalidRequestError, shown
from ...engine.request import SamplingParams, derived_seed
from ...engine.structured.structured_outputs import StructuredOutputsParams
from ...storage.columns import SCHEMA_VERSION
from ...storage.errors import Argument
from ..errors import LaterVersion, SpecError
from .json_values import in_order
from .lora import LoraModule
from .messages import template_kwargs_problem
from .precision import Precision
from .response_format import ResponseFormat, StructuredOutputs, checked
from .tool_choice import ToolChoice, choice_problem, forced_form, is_forced
from .tools import functions_of, tools_problem

# Where our own messages name another argument than their own.
_SECOND = re.compile(
    r"(?:(?<=meaning with )|(?<=1 with )|(?<=meaning without )|(?<=: give )|(?<=, and a ))"
    r"(choices|temperature|reasoning|logprobs|n)\b"
)
# A longer text is not repeated in the message about it.
_SHORT = 40
# Every token of every answer is looked at for the beginning of a stop, in a thread that all answers share; and each
# sample is a request of its own in the engine.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256
# Each is looked at likewise, though nearly all at once.
MAX_BAD_WORDS = 1024
MAX_SAMPLES = 1024
# To `JobSpec`. Whoever adds an option adds it here: so do folders that are there stay resumable, and workers that have
# not been upgraded yet go on with jobs that do without it.
_ADDED = (
    *("kv_cache_dtype", "vote", "chat_template_kwargs", "lora", "image", "sampling_defaults", "told_time", "tools"),
    *("tool_choice", "parallel_tool_calls"),
)
# The same to `SamplingSpec`.
_ADDED_TO_SAMPLING = (
    *("prompt_logprobs", "reasoning", "thinking_token_budget"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
)
# What an answer may have where nothing is said, and with all that is thought before it.
_ANSWER_TOKENS, _THINKING_TOKENS = 256, 32_768
Texts = TypeVar("Texts", str, None, tuple[str, ...])
Stored = TypeVar("Stored", bound=BaseModel)
KvCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]


_NUMBERS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("max_tokens", "min_tokens", "top_logprobs", "prompt_logprobs", "seed", "thinking_token_budget"),
)


class SamplingSpec(BaseModel):
    """How every row of a job is sampled. Greedy unless a temperature is given, as bulk jobs are mostly repeated.

    `seed` is the job's; each row draws with a seed of its own derived from it and its number, so that a row's
    answer depends neither on its neighbours nor on which attempt computed it. `n` answers each row that many times.
    `logprobs`, `top_logprobs` and `response_format` mean what they mean in OpenAI's chat API, `structured_outputs` what
    it means in vLLM's, as does `thinking_token_budget`. The others are `SamplingParams`'.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            description="With what is thought before it; if not given 256, with reasoning 256 more than its budget or "
            "32,768",
        ),
    ] = _ANSWER_TOKENS
    min_tokens: int = 0
    logit_bias: dict[int, float] = Field(default={}, description="What is added to the logits of these token ids")
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning: Annotated[bool, Field(description="Whether the model thinks first, and the answer is what follows")] = (
        False
    )
    thinking_token_budget: Annotated[int, Field(ge=0, description="After so many tokens it thinks no more")] | None = (
        None
    )

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _is_number(cls, value: Any) -> Any:
        return _number(value)

    @field_validator("stop", "stop_token_ids", "allowed_token_ids", "bad_words", mode="before")
    @classmethod
    def _is_in_order(cls, value: Any) -> Any:
        return in_order(value)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("n")
    @classmethod
    def _is_not_too_many(cls, value: int) -> int:
        if value > MAX_SAMPLES:
            raise ValueError(f"must be at most {MAX_SAMPLES}")
        return value

    @field_validator("top_k")
    @classmethod
    def _all_is_zero(cls, value: int) -> int:
        return 0 if value == -1 else value

    @field_validator("stop")
    @classmethod
    def _is_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOPS or max(map(len, value), default=0) > MAX_STOP_CHARACTERS:
            raise ValueError(f"must be at most {MAX_STOPS} texts of up to {MAX_STOP_CHARACTERS} characters")
        return _storable(value)

    @field_validator("bad_words", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("bad_words")
    @classmethod
    def _are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_BAD_WORDS or max(map(len, value), default=0) > MAX_STOP_CHARACTERS:
            raise ValueError(f"must be at most {MAX_BAD_WORDS} texts of up to {MAX_STOP_CHARACTERS} characters")
        return _storable(value)

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise ValueError("has no meaning without logprobs")
        return value

    @field_validator("response_format", "structured_outputs")
    @classmethod
    def _can_be_compiled(cls, value: Any, info: ValidationInfo) -> Any:
        checked(value)
        other = info.data.get("response_format")
        if value is not None and other is not None and other.params is not None:
            raise ValueError("excludes response_format: give one of the two")
        return value

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What every answer has to look like, if it has to look like anything."""
        given = self.structured_outputs or self.response_format
        return None if given is None else given.params

    def params(self, row: int, choices: tuple[str, ...] | None) -> SamplingParams:
        """One row's parameters for the engine. Raises `InvalidRequestError` naming the field out of range."""
        return SamplingParams(
            **self.model_dump(exclude={"logprobs", "top_logprobs", "seed", "response_format", "structured_outputs"}),
            structured_outputs=self.structure,
            logprobs=self.top_logprobs if self.logprobs else None,
            seed=row_seed(self.seed, row),
            choices=choices,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `SpecError` for a token id that the model does not have."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    problem = f": token id {token} is outside the vocabulary of {vocab_size} tokens"
                    raise SpecError(Argument(name), problem, field=f"sampling.{name}")


class JobSpec(BaseModel):
    """A job: which model answers which prompts, and how.

    `prompt` is a template over the input's columns (`{text}`); without one each row brings `messages`, or a
    `prompt` column of plain text. `choices` restricts every answer to one of them. With an `endpoint` of OpenAI's API
    each row brings the `body` of a request to it instead, and that says how the row is sampled; `sampling.seed` is
    then what rows without a seed derive theirs from, and `sampling_defaults` what else they do not say. With `cache`
    answers that earlier such jobs have given to the same prompts are taken, and new ones kept for later jobs. With
    `vote` the answer is what most of `sampling.n` say. `chat_template_kwargs`: what the model's chat template is told;
    a row's own column of that name goes before it. `lora`: the adapter that the model answers with. `image`: the column
    of a row's image, or images. `told_time`: what a chat template that asks for the time is told in all rows, whenever
    they are asked. `tools`: the functions that the template shows the model; a row's own column goes before them.
    `tool_choice`: whether an answer has to call one, as in OpenAI's chat API, and `parallel_tool_calls`: whether it may
    call several.
    `schema_version`: which columns the data set has, as docs/data-set.md tells; jobs of before it was noted have 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    kv_cache_dtype: KvCacheDType = "auto"
    system: str | None = None
    prompt: str | None = None
    choices: tuple[str, ...] | None = None
    sampling: SamplingSpec = SamplingSpec()
    limit: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    cache: bool = False
    vote: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    lora: LoraModule | None = None
    image: str | None = None
    sampling_defaults: dict[str, int | float] = {}
    told_time: datetime | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = 1

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, self.quantization, self.kv_cache_dtype)

    @property
    def worker_options(self) -> list[str]:
        """Those of `headrace worker` for one that answers the job."""
        lora = self.lora.worker_options if self.lora is not None else []
        return ["--model", self.model, *self.precision.worker_options, *lora]

    @property
    def samples_each_row(self) -> bool:
        """Whether each row says for itself how it is sampled."""
        return self.endpoint is not None

    @property
    def num_answers(self) -> int:
        """How often the engine answers a row at most: of choices, a vote's samples may be drawn from one answer."""
        return 1 if self.draws_votes else self.sampling.n

    @property
    def draws_votes(self) -> bool:
        """Whether all votes come from one answer's probabilities, which do not depend on what was thought before."""
        return self.vote and self.choices is not None and not self.sampling.reasoning

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return model_name(model)

    @field_validator("limit", mode="before")
    @classmethod
    def _is_number(cls, value: Any) -> Any:
        return _number(value)

    @field_validator("choices", mode="before")
    @classmethod
    def _are_several(cls, value: Any) -> Any:
        # Each letter of a text would be a choice.
        if isinstance(value, str):
            raise ValueError("must be a list of texts")
        return tuple(in_order(value)) if isinstance(value, Iterable) and not isinstance(value, Mapping) else value

    @field_validator("vote")
    @classmethod
    def _needs_several(cls, value: bool, info: ValidationInfo) -> bool:
        sampling = info.data.get("sampling")
        if value and sampling is not None and sampling.n == 1:
            raise ValueError("needs several answers to each row: give n, and a temperature above 0")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _can_be_told(cls, value: Any) -> Any:
        if value is not None and (problem := template_kwargs_problem(value)) is not None:
            raise PydanticCustomError("template_kwargs", "{problem}", {"problem": problem})
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _can_be_called(cls, value: Any) -> Any:
        if value is not None and (problem := tools_problem(value)) is not None:
            raise PydanticCustomError("tools", "{problem}", {"problem": problem})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _auto_is_none(cls, value: ToolChoice | None) -> ToolChoice | None:
        return None if value == "auto" else value

    @field_validator("model", "system", "prompt", "choices")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        return _storable(value)

    @classmethod
    def parse(cls, **values: Any) -> "JobSpec":
        """Check a new job's description. Raises `SpecError` naming the first field that is off."""
        try:
            spec = cls(**{"schema_version": SCHEMA_VERSION, **values})._with_room_to_think()
            spec.sampling.params(0, spec.choices)
            spec._check_tool_choice()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            told = _with_arguments(f": {problem(first)}")
            raise SpecError(Argument(field.removeprefix("sampling.")), *told, field=field) from error
        except InvalidRequestError as error:
            raise _refusal(error) from error
        return spec

    def _check_tool_choice(self) -> None:
        """Raises `SpecError` where no answer can be as it wants it."""
        if not is_forced(self.tool_choice):
            return
        problem = None
        if self.choices is not None or self.sampling.structure is not None:
            problem = "says what the answer is: leave out what else gives it a form"
        elif self.tools is not None or self.prompt is not None:
            # Otherwise rows may bring functions of their own.
            problem = choice_problem(functions_of(self.tools or ()), self.tool_choice)
        if problem is not None:
            raise SpecError(Argument("tool_choice"), f" {problem}", field="tool_choice")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self.sampling, name):
                told = " cannot be held to beside ", Argument("tool_choice"), ": leave out one of the two"
                raise SpecError(Argument(name), *told, field=f"sampling.{name}")
        try:
            checked(forced_form(functions_of(self.tools or ()), self.tool_choice) if self.tools else None)
        except ValueError as error:
            raise SpecError(Argument("tools"), f": {error}", field="tools") from error

    def _with_room_to_think(self) -> "JobSpec":
        """Where nobody has said how long an answer may be, the thinking does not use it up."""
        sampling = self.sampling
        if not sampling.reasoning or "max_tokens" in sampling.model_fields_set:
            return self
        budget = sampling.thinking_token_budget
        max_tokens = _THINKING_TOKENS if budget is None else budget + _ANSWER_TOKENS
        return self.model_copy(update={"sampling": sampling.model_copy(update={"max_tokens": max_tokens})})

    def fingerprint(self, input_fingerprint: str) -> str:
        """The same for the same work: the input's content and every option that can change an answer."""
        # Folders of before there was a choice of these, and of another day, are resumed too.
        left_out = {"cache": True, "schema_version": True, "told_time": True, **self._unasked}
        text = f"{input_fingerprint}\n{self.model_dump_json(exclude=left_out)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def stored(self) -> dict[str, Any]:
        """As the ledger keeps it, for `read_stored`; an earlier version reads one that uses nothing new."""
        return self.model_dump(mode="json", exclude=self._unasked)

    @property
    def _unasked(self) -> dict[str, Any]:
        """What there has not been from the beginning and nobody asks for, as pydantic leaves it out."""
        fields = type(self).model_fields
        unasked: dict[str, Any] = {name: True for name in _ADDED if getattr(self, name) == fields[name].default}
        fields = SamplingSpec.model_fields
        later = {name for name in _ADDED_TO_SAMPLING if getattr(self.sampling, name) == fields[name].default}
        return {**unasked, "sampling": later} if later else unasked


def read_stored(kind: type[Stored], values: Mapping[str, Any] | str, what: str = "job") -> Stored:
    """The description of a job, of a row of one, or of what else it is, as it was written down; a text is JSON.

    Raises `LaterVersion` where it asks for what is not known here.
    """
    try:
        return kind.model_validate_json(values) if isinstance(values, str) else kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise LaterVersion(f"the {what} is of a later headrace ({name}: {problem(first)}): upgrade this one") from error


def _refusal(error: InvalidRequestError) -> SpecError:
    """What `SamplingParams` refuses: its messages begin with the field's name."""
    assert error.field is not None
    field = error.field if error.field in JobSpec.model_fields else f"sampling.{error.field}"
    return SpecError(Argument(error.field), *_with_arguments(str(error).removeprefix(error.field)), field=field)


def _with_arguments(text: str) -> list[str | Argument]:
    """A message that may name a second argument by a word that is one of the language too."""
    return [Argument(part) if index % 2 else part for index, part in enumerate(_SECOND.split(text))]


def problem(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors in our words: what is allowed, and what was given."""
    if error["type"] == "extra_forbidden":
        return "there is no such option"
    if error["type"] == "model_attributes_type":
        # Pydantic speaks of Python's objects and their attributes.
        return "Input should be an object with fields"
    message, given = str(error["msg"]).removeprefix("Value error, "), error["input"]
    if isinstance(given, str):
        # Of a text that was looked at before, pydantic counts the items.
        message = message.replace("items after validation", "characters")
    message = message.replace(" after validation", "")
    is_short = isinstance(given, bool | int | float) or (isinstance(given, str) and len(given) <= _SHORT)
    # That a flag is set says nothing more.
    return f"{message}, not {shown(given)}" if is_short and given is not True else message


def _number(value: Any) -> Any:
    """Python counts true and false among the numbers, as pydantic does numpy's; here they are a mistake.

    What no tensor holds is none either.
    """
    if isinstance(value, bool) or getattr(value, "dtype", None) == "bool":
        raise PydanticCustomError("number", "Input should be a number, not {value}", {"value": str(value).lower()})
    if isinstance(value, int) and value >= 2**64:
        raise PydanticCustomError("number", "Input should be below 2**64")
    return value


def _storable(value: Texts) -> Texts:
    """Refuse what a shell may pass through but nothing can store: bytes that are no UTF-8."""
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid UTF-8") from error
    return value


def row_seed(seed: int, row: int) -> int:
    """A row's own seed in [0, 2**63)."""
    return derived_seed(f"{seed}/{row}")
