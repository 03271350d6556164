"""How answers are sampled, as users say it."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ...engine.sampling_params import SamplingParams, derived_seed
from ...engine.structured.structured_outputs import StructuredOutputsParams
from ...storage.errors import Argument
from ..errors import SpecError
from .checks import number, storable
from .json_values import in_order
from .response_format import ResponseFormat, StructuredOutputs, checked

# Every token of every answer is looked at for the beginning of a stop, in a thread that all answers share; and each
# sample is a request of its own in the engine.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256
# Each is looked at likewise, though nearly all at once.
MAX_BAD_WORDS = 1024
MAX_SAMPLES = 1024
# Whoever adds an option adds it here, as to those of `schemas.py`.
_ADDED = (
    *("prompt_logprobs", "reasoning", "thinking_token_budget"),
    *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
)
# What an answer may have where nothing is said, and with all that is thought before it.
_ANSWER_TOKENS, _THINKING_TOKENS = 256, 32_768
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
        return number(value)

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
        return _looked_for(value, MAX_STOPS)

    @field_validator("bad_words", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("bad_words")
    @classmethod
    def _are_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _looked_for(value, MAX_BAD_WORDS)

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

    def params(self, choices: tuple[str, ...] | None) -> SamplingParams:
        """The same for the engine. Raises `InvalidRequestError` naming the field out of range."""
        return SamplingParams(
            **self.model_dump(exclude={"logprobs", "top_logprobs", "response_format", "structured_outputs"}),
            structured_outputs=self.structure,
            logprobs=self.top_logprobs if self.logprobs else None,
            choices=choices,
        )

    def with_room_to_think(self) -> "SamplingSpec":
        """The same, with a longer answer where the model thinks and nobody has said how long it may be."""
        if not self.reasoning or "max_tokens" in self.model_fields_set:
            return self
        budget = self.thinking_token_budget
        return self.model_copy(update={"max_tokens": _THINKING_TOKENS if budget is None else budget + _ANSWER_TOKENS})

    @property
    def unasked(self) -> set[str]:
        """What there has not been from the beginning and nobody asks for."""
        fields = type(self).model_fields
        return {name for name in _ADDED if getattr(self, name) == fields[name].default}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `SpecError` for a token id that the model does not have."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    problem = f": token id {token} is outside the vocabulary of {vocab_size} tokens"
                    raise SpecError(Argument(name), problem, field=f"sampling.{name}")


def _looked_for(texts: tuple[str, ...], most: int) -> tuple[str, ...]:
    if len(texts) > most or max(map(len, texts), default=0) > MAX_STOP_CHARACTERS:
        raise ValueError(f"must be at most {most} texts of up to {MAX_STOP_CHARACTERS} characters")
    return storable(texts)


def row_seed(seed: int, row: int) -> int:
    """A row's own seed in [0, 2**63)."""
    return derived_seed(f"{seed}/{row}")
