"""What goes into the engine and what comes out: requests, sampling parameters, events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .errors import InvalidRequestError


class FinishReason(StrEnum):
    """Why a request ended, in the OpenAI API's words; `ABORT` is ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; the names and defaults are vLLM's.

    `temperature=0` is greedy. `top_k=0` keeps the whole vocabulary. `max_tokens=None` means up to the model's
    context. `seed` makes a sample repeatable whatever else is in the batch; without one the engine derives a
    seed from its own and the request id. `choices` restricts the answer to one of the given texts and reports
    the probability of each.

    Raises `InvalidRequestError` naming the field that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "≥ 0", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= 0, "top_k", "≥ 0 (0 keeps all)", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "≥ 1", self.max_tokens)
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", "in [0, 2**63)", self.seed)
        if self.choices is not None:
            _check_choices(self.choices)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise InvalidRequestError(f"{name} must be {expected}, not {value}")


def _check_choices(choices: Sequence[str]) -> None:
    if isinstance(choices, str) or not choices:
        raise InvalidRequestError("choices must be a non-empty list of texts")
    if any(not choice for choice in choices):
        raise InvalidRequestError("choices must not hold an empty text")
    if len(set(choices)) != len(choices):
        raise InvalidRequestError("choices must be different from each other")


@dataclass(frozen=True)
class Request:
    """One prompt for the engine.

    `choice_token_ids`: the token ids of each of `params.choices`, in order; the engine itself knows no tokenizer.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    choice_token_ids: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class RequestEvent:
    """What one step brought for one request.

    `new_token_ids` follow those of earlier events. The last event has a `finish_reason`; with choices it also
    has `choice_index` and `choice_probabilities` (in the order of the choices, summing to one).
    `num_cached_tokens`: prompt tokens whose KV was found in the prefix cache.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    choice_index: int | None = None
    choice_probabilities: tuple[float, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
