"""The body of `POST /v1/completions`."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from .request_body import UNSUPPORTED, misfit, only
from .sampling_schemas import SamplingFields

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 2048
Prompt = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of a request: it may give one or a list, as texts or as token ids."""
    many = value if isinstance(value, list) and not _are_token_ids(value) else [value]
    if not many or len(many) > MAX_CHOICES:
        raise ValueError(f"must be one prompt, or a list of 1 to {MAX_CHOICES}")
    return tuple(map(_prompt, many))


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _are_token_ids(value):
        return tuple(value)
    raise ValueError("must be a text, a list of token ids, or a list of these")


def _are_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(SamplingFields):
    """Texts to be continued; as in OpenAI's older API, with vLLM's further sampling parameters.

    `echo` puts the prompt in front of each answer, with `logprobs` also its tokens' own; with `max_tokens` 0 it comes
    alone. The choices of several prompts come one after the other.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: Annotated[Any, AfterValidator(only(""))] = None
    add_special_tokens: Annotated[Any, AfterValidator(only(True))] = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise misfit("best_of", "best_of other than n is not supported here: leave it out", UNSUPPORTED)
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise misfit("prompt", f"prompt times n is more than {MAX_CHOICES} choices: send several requests")
        if self.max_tokens == 0 and not self.echo:
            raise misfit("max_tokens", "max_tokens: must be at least 1 without echo, which is all that 0 would give")
        return self

    @property
    def echoes_only(self) -> bool:
        """Whether no answer is wanted, only what the model thinks of the prompt."""
        return self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        # The engine answers with one token at least.
        return None if self.max_tokens is None else max(1, self.max_tokens)

    def _of_its_own(self) -> dict[str, Any]:
        prompt_logprobs = self.logprobs if self.echo else None
        return {
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs or 0,
            "prompt_logprobs": prompt_logprobs,
        }
