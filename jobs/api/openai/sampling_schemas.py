"""How answers are sampled, as OpenAI's requests say it, with vLLM's additions."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ....engine.errors import InvalidRequestError
from ....engine.sampling.defaults import SamplingDefaults
from ...spec.response_format import ResponseFormat, StructuredOutputs
from ...spec.sampling import SamplingSpec
from ..errors import ApiError
from ..schemas import Choices, Text
from .request_body import Body, Ignored, misfit, refusal
from .vllm_fields import VllmFields

_MAX_SAMPLES = 128
_SEED_MASK = 2**63 - 1
# No longer: Python reads some thousand digits, and raises an error of its own for more.
_TOKEN_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_biases(biases: Mapping[str, float]) -> Mapping[str, float]:
    """JSON has only texts for names, OpenAI's clients write token ids in them."""
    for token in biases:
        if not _TOKEN_ID.fullmatch(token):
            raise ValueError(f"maps token ids to numbers, and {token[:40]!r} is no token id")
    return biases


Stops = Annotated[list[Text], BeforeValidator(_one_or_more, json_schema_input_type=str | list[str] | None)]
Biases = Annotated[dict[str, float], AfterValidator(_token_biases)]


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices tells the tokens used.

    With `continuous_usage_stats` each chunk before it tells those of its choice so far.
    """

    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: bool | None = None


class SamplingFields(VllmFields, ABC):
    """What chat and plain completions share. A null stands for the default, as in OpenAI's API."""

    model: Text
    n: Annotated[int, Field(ge=1, le=_MAX_SAMPLES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[Text] | None = None
    skip_special_tokens: bool | None = None
    guided_choice: Choices | None = None
    structured_outputs: StructuredOutputs | None = None
    cancel_on_disconnect: Annotated[
        bool | None,
        Field(description="false: goes on when the client is gone, to be read at /requests/{x-request-id}/stream"),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise misfit("stream_options", "stream_options is only allowed when stream is true")
        if self.guided_choice is not None and self.structured_outputs is not None:
            raise misfit(
                "guided_choice", "guided_choice and structured_outputs exclude each other: give one of the two"
            )
        return self

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The texts of which the answer is to be one, as a whole."""
        return self.guided_choice

    @property
    def includes_usage(self) -> bool:
        """Whether a stream is to end with the tokens used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_running_usage(self) -> bool:
        """Whether each chunk is to tell the tokens used so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """The most tokens an answer may have, where the request says so."""
        return self.max_tokens

    def sampling(self, default_max_tokens: int, default_seed: int, defaults: SamplingDefaults) -> SamplingSpec:
        """The same for the engine, checked in itself. Raises `ApiError` (400) naming the field out of range.

        `defaults`: the model's own, which go before OpenAI's.
        """
        given = {"temperature": 1.0, **defaults}
        if self.choices is not None:
            # Among whole texts it has no meaning.
            given.pop("repetition_penalty", None)
        given |= {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        given["max_tokens"] = self.token_limit or default_max_tokens
        given["seed"] = (default_seed if self.seed is None else self.seed) & _SEED_MASK
        given["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        return checked_sampling(given | self._of_its_own(), self.choices)

    @abstractmethod
    def _of_its_own(self) -> dict[str, Any]:
        """`logprobs` and `top_logprobs` as the chat API has them, and what else is asked for elsewhere."""


_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "response_format",
    "structured_outputs",
)


def checked_sampling(values: Mapping[str, Any], choices: tuple[str, ...] | None) -> SamplingSpec:
    """Raises `ApiError` (400) naming the field that is out of range or goes ill with another."""
    try:
        spec = SamplingSpec(**values)
        spec.params(choices)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)[0]) from error
    except InvalidRequestError as error:
        # Under the name that the request has it.
        param = "guided_choice" if error.field == "choices" else error.field
        raise ApiError(400, str(error), "invalid_value", param) from error
    return spec
