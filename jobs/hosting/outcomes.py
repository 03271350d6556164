"""What becomes of a request that the engine was given."""

from dataclasses import dataclass
from typing import NamedTuple

from ...engine.logprobs import TokenLogprobs
from ...engine.request import FinishReason


class Answer(NamedTuple):
    """A request's whole answer, with what it was resumed from. The choice fields are None where it had no choices.

    `logprobs`: one for each token, where the request asked for them; `prompt_logprobs`: as `RequestEvent` has them.
    (A tuple, as thousands of them are made at a time.)
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    choice_index: int | None
    choice_probabilities: tuple[float, ...] | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True)
class Refusal:
    """A request that can never run, or failed by itself: its own fault. `has_run`: it was the latter."""

    request_id: str
    error: str
    has_run: bool = True


@dataclass(frozen=True)
class EngineFailure:
    """A request that the engine dropped because a step failed: it may run when tried again."""

    request_id: str
    error: str


Outcome = Answer | Refusal | EngineFailure
