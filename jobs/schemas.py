"""What users send: a job's description, checked once."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..engine.errors import InvalidRequestError
from ..engine.request import SamplingParams
from .errors import SpecError

Texts = TypeVar("Texts", str, None, tuple[str, ...])


class SamplingSpec(BaseModel):
    """How every row of a job is sampled. Greedy unless a temperature is given, as bulk jobs are mostly repeated.

    `seed` is the job's; each row draws with a seed of its own derived from it and its number, so that a row's
    answer depends neither on its neighbours nor on which attempt computed it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    max_tokens: Annotated[int, Field(ge=1)] = 256
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _is_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _storable(value)

    def params(self, row: int, choices: tuple[str, ...] | None) -> SamplingParams:
        """One row's parameters for the engine. Raises `InvalidRequestError` naming the field out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            max_tokens=self.max_tokens,
            seed=row_seed(self.seed, row),
            choices=choices,
        )


class JobSpec(BaseModel):
    """A job: which model answers which prompts, and how.

    `prompt` is a template over the input's columns (`{text}`); without one each row brings `messages`, or a
    `prompt` column of plain text. `choices` restricts every answer to one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    dtype: str = "auto"
    system: str | None = None
    prompt: str | None = None
    choices: tuple[str, ...] | None = None
    sampling: SamplingSpec = SamplingSpec()
    limit: Annotated[int, Field(ge=1)] | None = None

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        return str(Path(model).expanduser().absolute())

    @field_validator("model", "system", "prompt", "choices")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        return _storable(value)

    @classmethod
    def parse(cls, **values: Any) -> "JobSpec":
        """Check a description. Raises `SpecError` naming the first field that is off."""
        try:
            spec = cls(**values)
            spec.sampling.params(0, spec.choices)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"] if part != "sampling")
            raise SpecError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from error
        except InvalidRequestError as error:
            raise SpecError(str(error)) from error
        return spec

    def fingerprint(self, input_fingerprint: str) -> str:
        """The same for the same work: the input's content and every option that can change an answer."""
        text = f"{input_fingerprint}\n{self.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()


def _storable(value: Texts) -> Texts:
    """Refuse what a shell may pass through but nothing can store: bytes that are no UTF-8."""
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid UTF-8") from error
    return value


def row_seed(seed: int, row: int) -> int:
    """A row's own seed in [0, 2**63)."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
